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

from tests.conftest import PROJECT, ROOT
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
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    cuts = {kind for page in pages for kind in re.findall("<!-- cut: ([a-z]+)", page.read_text())}
    kinds = {"tree", "code", "output", "refusal", "sizes", "answers", "versions", "calls"}
    assert kinds | {"settings"} == cuts


def test_every_link_to_a_page_leads_somewhere() -> None:
    """In README.md, SECURITY.md and docs/, to files and headings; index.md lists all pages."""
    pages = [ROOT / "SECURITY.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    linked: dict[Path, set[Path]] = {}
    for page in pages:
        text = page.read_text("utf-8")
        targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="(.*?)"', text)
        linked[page] = set()
        for target in targets:
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), f"{page}: {target}"
            linked[page].add(path)
            assert not heading or heading in anchors(path), f"{page}: {target}"
    index = ROOT / "docs/index.md"
    assert linked[index] | {index} >= {*pages[2:]}, "a page that index.md does not list"


def test_every_link_of_a_render_leads_to_a_page_and_a_heading() -> None:
    """Its README links to the template's documentation, at the template's version."""
    readme = (ROOT / PROJECT / "README.md").read_text("utf-8")
    targets = re.findall(r"/blob/v{{ template_version }}/([^)]+)\)", readme)
    assert len(targets) >= 5
    for target in targets:
        name, _, heading = target.partition("#")
        assert (ROOT / name).exists(), target
        assert not heading or heading in anchors(ROOT / name), target


def anchors(page: Path) -> set[str]:
    """The anchors that a code host and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_reference_has_words_for_every_setting() -> None:
    """Each row: an option, a type, a default, a sentence, and the projects that have it."""
    page = (ROOT / "docs/reference/settings.md").read_text("utf-8")
    rows = re.findall(r"^\| `(--[^`]+)` \| (.*) \|$", page, re.MULTILINE)
    names = [name for name, _ in rows]
    assert len(names) > 90 and {"--train.seed", "--optim.clip", "--parallel.replicate"} <= {*names}
    for name, row in rows:
        kind, default, words, projects = row.split(" | ")
        assert kind and default and projects, name
        assert re.fullmatch(r"\S.{10,}\.", words), name


def test_the_messages_of_the_reference_are_those_of_the_code() -> None:
    """Words in capitals stand for values."""
    code = ""
    for folder in (ROOT / "templates", ROOT / PROJECT):
        for path in folder.rglob("*.py"):
            # A long text is written in several lines.
            code += re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8"))
    page = (ROOT / "docs/reference/messages.md").read_text("utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    for message in messages:
        for words in re.split(r"\b[A-Z]{4,}\b|\bN\b", message):
            assert words.strip() in code, message


def test_every_field_of_metrics_is_in_the_reference() -> None:
    """The names that a run writes to metrics.jsonl (FIGURES in journal.py), each in a row."""
    path = ROOT / PROJECT / "src/{{cookiecutter.package_name}}/run/journal.py"
    text = re.search(r"FIGURES = re.compile\((.*?)\n\)", path.read_text("utf-8"), re.DOTALL)
    pattern = "".join(re.findall(r'"(.*?)"', text[1]))
    page = (ROOT / "docs/reference/run-directory.md").read_text("utf-8")
    fields = set(re.findall(r"`(\w+)`", page))
    names: list[str] = []
    for alternative in re.findall(r"(?:\(.*?\)|[^|])+", pattern):
        choices = re.search(r"\((.*?)\)", alternative)
        for choice in choices[1].split("|") if choices else [""]:
            names.append(re.sub(r"\(.*?\)", choice, alternative))
    assert len(names) > 20
    for name in names:
        # A validation's metrics and a mixture's sources have names of the user's.
        if name == "ema_.*":
            name = "validation_ema_.*"
        assert any(re.fullmatch(name, field) for field in fields), name


def test_the_conclusions_have_the_numbers_of_the_raw_tables() -> None:
    """Each row of evidence/index.md, against the page that it links to."""
    folder = ROOT / "docs/evidence"
    rows = re.findall(r"^\| (.*\]\((\w+\.md)#.*?\)) \|$", (folder / "index.md").read_text(), re.M)
    assert len(rows) > 10
    for row, page in rows:
        conclusion, n, *_ = row.split(" | ")
        numbers = re.findall(r"\d[\d,]*\.?\d+", f"{conclusion} {n}")
        shown = (folder / page).read_text("utf-8")
        for number in numbers:
            assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,])", shown), (number, row)


def test_readme_names_each_question_and_its_choices() -> None:
    """In the order of cookiecutter.json, in which the first choice is the default."""
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    wanted = {name: it for name, it in questions.items() if not name.startswith("_")}
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.partition("## The questions\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert list(rows) == list(wanted)
    for name, choices in wanted.items():
        if isinstance(choices, list):
            assert rows[name] == ", ".join(choices), name


def test_every_place_names_the_same_version() -> None:
    version = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and (cited["version"], newest[1]) == (version, version)
    assert f"--checkout v{version}" in (ROOT / "docs/guides/updates.md").read_text("utf-8")


def test_no_phrase_has_to_be_read_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In documentation, docstrings, comments and messages; and one that is planted is named."""
    prose = runpy.run_path(str(ROOT / "scripts/check_prose.py"))
    assert prose["main"]([]) == 0, capsys.readouterr().out
    files = {path.relative_to(ROOT).as_posix() for path in prose["files"](list(prose["TEXT"]))}
    assert {"README.md", "docs/guides/model.md", "templates/checkpoint/dcp.py"} <= files
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
    told = re.search(r"We tested checkpoints with (.*?)\. No\s", readme, re.DOTALL)
    assert told, "the figures of README have other words: state them anew"
    figures = re.findall(r"\d[\d,]*\d", told[1])
    assert len(figures) == 4 and all(figure in shown for figure in figures)


@pytest.mark.parametrize(
    "topic", ["crash_points", "kill_storm", "damage", "hostile_files", "stops"]
)
def test_the_conclusions_have_the_date_of_their_results(topic: str) -> None:
    index = (ROOT / "docs/evidence/index.md").read_text("utf-8")
    rows = [row for row in index.splitlines() if f"[{topic.replace('_', ' ')}](" in row]
    assert len(rows) == 1
    result = json.loads((reliability.RESULTS / f"{topic}.json").read_text("utf-8"))
    assert f" {result['date']} " in rows[0]
