"""The tutorial, as far as a render alone shows it; `make tutorial` types it all."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tutorial import BLOCK, PAGES, kept
from tests.conftest import bake

TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)
COMMANDS = [
    words
    for line in re.findall(r"^\$ (.*)", TEXT, re.MULTILINE)
    if (words := line.partition("first_day ")[2] or line.partition("launch.sh -n 2 ")[2])
    and "load_trained" not in line
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of the page."""
    return bake(tmp_path_factory.mktemp("tutorial"), project_name="First Day")


def test_the_edit_of_the_page_applies(project: Path) -> None:
    (patch,) = (block for *_, kind, block in BLOCK.findall(TEXT) if kind == "diff")
    command = ["git", "apply", "--check", "-"]
    done = subprocess.run(command, input=patch, text=True, cwd=project, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_every_option_of_the_page_is_one_of_its_command(project: Path) -> None:
    """In one process, whose start costs more than all helps together."""
    asked = [shlex.split(words.partition(" #")[0]) for words in COMMANDS]
    assert {name for name, *_ in asked} >= {"train", "baseline", "scale", "export", "report"}
    code = "import contextlib, io, json, sys\nfrom first_day.__main__ import dispatch\n"
    code += "for name in sys.argv[1:]:\n    with contextlib.suppress(SystemExit):\n"
    code += "        print('#', name)\n        dispatch([name, '--help'])\n"
    names = sorted({name for name, *_ in asked})
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=project / "src",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    helps = dict(part.split("\n", 1) for part in ("\n" + done.stdout).split("\n# ")[1:])
    assert helps.keys() == {*names}
    for name, *words in asked:
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", helps[name]), (name, option)


def test_what_is_kept_of_an_output() -> None:
    lines = ["a", "b", "c"]
    assert kept(lines, None, "") == lines
    assert kept(lines, "last", "0") == []
    assert kept(lines, "last", "2") == ["...", "b", "c"]
    assert kept(lines, "last", "9") == lines
    assert kept(lines, "matching", "a|c") == ["...", "a", "c"]
