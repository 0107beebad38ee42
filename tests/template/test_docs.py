"""What the documentation shows was cut from a render of today."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.stress import page as reliability

SCRIPT = ROOT / "scripts/cut_docs.py"
PAGE = """# Page

<!-- cut: tree -->
<!-- end -->
In between.

<!-- cut: code src/my_training_run/model.py compute_loss -->
<!-- end -->

<!-- cut: output python -c 'print("shown")' -->
<!-- end -->
The end.
"""


def test_the_documentation_is_current() -> None:
    """When this fails: `make docs`, and look at what has changed."""
    outcome = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=1500
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    cuts = {kind for page in pages for kind in re.findall("<!-- cut: ([a-z]+)", page.read_text())}
    kinds = {"tree", "code", "output", "refusal", "sizes", "answers", "versions", "calls"}
    assert kinds == cuts


def test_every_link_to_a_page_leads_somewhere() -> None:
    """In README.md, SECURITY.md and docs/, to files and to their headings."""
    pages = [ROOT / "SECURITY.md", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    linked = set()
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), f"{page.name}: {target}"
            linked.add(path)
            if heading:
                headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", it.lower()).replace(" ", "-") for it in headings]
                assert heading in anchors, f"{page.name}: {target}"
    assert linked >= {page.resolve() for page in pages[2:]}, "a page that nothing links to"


def test_every_place_names_the_same_version() -> None:
    version = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and (cited["version"], newest[1]) == (version, version)
    assert f"--checkout v{version}" in (ROOT / "docs/updating.md").read_text("utf-8")


def test_no_phrase_has_to_be_read_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In documentation, docstrings, comments and messages; and one that is planted is named."""
    prose = runpy.run_path(str(ROOT / "scripts/check_prose.py"))
    assert prose["main"]([]) == 0, capsys.readouterr().out
    files = {path.relative_to(ROOT).as_posix() for path in prose["files"](list(prose["TEXT"]))}
    assert {"README.md", "docs/how-do-i.md", "templates/checkpoint/dcp.py"} <= files
    (tmp_path / "planted.md").write_text("The run\ngoes on.\n")
    assert prose["main"]([str(tmp_path / "planted.md")]) == 1
    assert "planted.md:2: 'goes on'" in capsys.readouterr().out


def test_nothing_is_misspelled() -> None:
    """By codespell, with the words of pyproject.toml."""
    command = [sys.executable, "-m", "codespell_lib"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_stale_block_is_named_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("cut", SCRIPT)
    assert spec and spec.loader
    cut = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cut)
    page = tmp_path / "page.md"
    page.write_text(PAGE, "utf-8")
    lines = {3: "tree", 7: "code", 10: "output"}

    assert cut.main(["--check", str(page)]) == 1
    assert page.read_text("utf-8") == PAGE
    named = re.findall(r"^.*page\.md:(\d+): stale: (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert {int(line): kind for line, kind in named} == lines

    assert cut.main([str(page)]) == 0
    mended = page.read_text("utf-8")
    assert re.sub(r"```.*?```\n", "", mended, flags=re.DOTALL) == PAGE
    assert re.search(r"```\nmy-training-run/\n  launch\.sh +Start training under torchrun", mended)
    for text in (
        "```python\ndef compute_loss(",
        "```console\n$ python -c 'print(\"shown\")'\nshown\n```\n<!-- end -->\nThe end.\n",
    ):
        assert text in mended
    assert cut.main(["--check", str(page)]) == 0

    page.write_text(mended.replace("In between.", "<!-- cut: tree -->"), "utf-8")
    with pytest.raises(ValueError, match="has no end"):
        cut.main(["--check", str(page)])


def test_the_page_of_reliability_is_what_the_results_say() -> None:
    """When this fails: `make torture`, or `python -m tests.stress.page` after a single topic."""
    shown, results = reliability.PAGE.read_text("utf-8"), reliability.RESULTS
    assert reliability.page(results) == shown
    for topic in reliability.TOPICS:
        result = json.loads((results / f"{topic}.json").read_text("utf-8"))
        assert not result["bounded"]
        assert all(it["tried"] and not it["violations"] for it in result["tallies"]), topic
    matrix = json.loads((results / "matrix.json").read_text("utf-8"))
    assert not matrix["bounded"] and not matrix["failures"]
    readme = (ROOT / "README.md").read_text("utf-8")
    told = re.search(r"Tried on checkpoints: (.*?)\. No\s", readme, re.DOTALL)
    figures = re.findall(r"\d[\d,]*\d", told[1])
    assert len(figures) == 4 and all(figure in shown for figure in figures)
