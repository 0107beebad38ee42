"""A render among the tools of its users: installers, editors, type checkers, hooks, CI."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, bake
from tests.template.test_render import FULLEST, SMALLEST


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bake(tmp_path_factory.mktemp("ecosystem"))


@pytest.fixture(scope="module")
def told(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text("utf-8"))


def test_uv_finds_the_tools_and_a_torch_for_cpu_or_cuda(told: dict[str, Any]) -> None:
    groups = told["dependency-groups"]
    assert groups["dev"] == told["project"]["optional-dependencies"]["dev"]
    assert [re.match("[a-z-]+", tool)[0] for tool in groups["dev"]] == [
        *("pytest", "ruff", "basedpyright", "pre-commit", "pre-commit-hooks"),
    ]
    indexes = {index["name"]: index for index in told["tool"]["uv"]["index"]}
    for source in told["tool"]["uv"]["sources"]["torch"]:
        index = indexes[source["index"]]
        assert groups[source["group"]] == ["torch"] and index["explicit"]
        assert index["url"].startswith("https://download.pytorch.org/whl/c")
    assert told["tool"]["uv"]["conflicts"] == [[{"group": "cpu"}, {"group": "cuda"}]]


def test_its_metadata_says_what_it_is(project: Path, told: dict[str, Any]) -> None:
    classifiers = told["project"]["classifiers"]
    versions = [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)]
    assert {*versions, "Typing :: Typed"} < {*classifiers}
    assert not any(name.startswith("License") for name in classifiers)  # it has an expression
    assert told["project"]["urls"]["Template"].startswith("https://")
    assert list((project / "src").glob("*/py.typed"))
    assert "py.typed" in told["tool"]["setuptools"]["package-data"]["*"]
    ci = yaml.safe_load((project / ".github/workflows/ci.yml").read_text("utf-8"))
    job = ci["jobs"]["test"]
    assert job["strategy"]["matrix"]["python-version"] == ["3.11", "3.12", "3.13"]
    (python,) = (step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert python["cache"] == "pip" and "matrix.python-version" in python["python-version"]
    assert "basedpyright" in [step.get("run") for step in job["steps"]]


def test_its_readme_installs_in_the_right_order(project: Path) -> None:
    text = (project / "README.md").read_text("utf-8")
    assert text.index("whl/cpu") < text.index("pip install -e")
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    assert "python3 -m venv" in blocks and not re.search(r"\bpython -m", blocks)


def test_each_link_of_a_render_leads_to_a_page_of_its_template(project: Path) -> None:
    """At the version that rendered it, to a heading that is there."""
    text = (project / "README.md").read_text("utf-8")
    version = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
    links = re.findall(rf"/blob/v{re.escape(version)}/(docs/[\w/-]+\.md)(?:#([\w-]+))?\)", text)
    assert len(links) == text.count("/blob/") >= 4
    for page, heading in links:
        headings = re.findall(r"^## (.+)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
        assert not heading or heading in [it.lower().replace(" ", "-") for it in headings]


def hooks(project: Path, *files: str) -> str:
    """What pre-commit says of some files, which it has to refuse."""
    command = [sys.executable, "-m", "pre_commit", "run", "--files", *files]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PRE_COMMIT_HOME": str(project / ".pre-commit")}
    ended = subprocess.run(
        command, cwd=project, env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("name", "content", "hook", "message"),
    [
        ("bad.yaml", "a: [1\n", "YAML can be read", "expected ',' or ']'"),
        ("bad.toml", "a = [1\n", "TOML can be read", "bad.toml: Unclosed array"),
        ("bad.md", "a \n", "no whitespace at the end of a line", "Fixing bad.md"),
        ("bad.txt", "a", "each file ends with one line break", "Fixing bad.txt"),
        ("bad.bin", "\0" * 1_100_000, "no file above 1 MB", "bad.bin (1075 KB) exceeds 1000 KB"),
    ],
)
def test_its_hooks_name_what_is_wrong(
    project: Path, name: str, content: str, hook: str, message: str
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / name).write_text(content)
    said = hooks(project, name)
    (project / name).unlink()
    failed = [line for line in said.splitlines() if line.endswith("Failed")]
    assert len(failed) == 1 and failed[0].startswith(hook), said
    assert message in said


def test_a_type_checker_finds_nothing_in_a_render(tmp_path: Path) -> None:
    """Pyright's basic rules, as its pyproject.toml says, for the default and both extremes."""
    environments = []
    for name, answers in (("default", {}), ("fullest", FULLEST), ("smallest", SMALLEST)):
        bake(tmp_path, project_slug=name, package_name=f"the_{name}", **answers)
        environments.append({"root": name, "extraPaths": [f"{name}/src"]})
    settings = tomllib.loads((tmp_path / "default/pyproject.toml").read_text("utf-8"))
    settings = settings["tool"]["pyright"]
    assert settings["include"] == ["src"] and settings["typeCheckingMode"] == "basic"
    include = [f"{e['root']}/{folder}" for e in environments for folder in settings["include"]]
    settings |= {"include": include, "executionEnvironments": environments}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert "0 errors, " in ended.stdout, ended.stdout + ended.stderr
