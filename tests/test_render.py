"""Every combination of answers renders a clean, complete project, the same by every road."""

import ast
import filecmp
import functools
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import PROJECT, ROOT, bake, bake_cli, copy_template

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
CHOICES = {
    name: QUESTIONS[name]
    for name in ("license", "task", "parallelism", "checkpoint", "tracker", "cluster")
}
Answers = tuple[str, ...]


def pairs(answers: Answers) -> set[tuple[tuple[int, str], ...]]:
    """Every two of the answers."""
    return set(itertools.combinations(enumerate(answers), 2))


def choose_renders() -> list[Answers]:
    """Answers to render: not the whole product, but whatever two answers may do to each other.

    All neighbours of the defaults (one answer changed); every task with every parallelism and
    every checkpoint, whose other answers are those that bring the most new pairs.
    """
    default = tuple(answers[0] for answers in CHOICES.values())
    chosen = dict.fromkeys(
        (*default[:place], answer, *default[place + 1 :])
        for place, answers in enumerate(CHOICES.values())
        for answer in answers
    )
    found = set().union(*map(pairs, chosen))
    for core in itertools.product(*(CHOICES[n] for n in ("task", "parallelism", "checkpoint"))):
        others = itertools.product(*(CHOICES[n] for n in ("license", "tracker", "cluster")))
        varied = [(a, *core, b, c) for a, b, c in others]
        best = max(varied, key=lambda answers: len(pairs(answers) - found))
        chosen[best] = None
        found |= pairs(best)
    return list(chosen)


RENDERS = choose_renders()
PACKAGE = "src/my_training_run"
CLUSTER = {
    "none": set(),
    "slurm": {"train.sbatch"},
    "kubernetes": {
        *("Dockerfile", ".dockerignore", "entrypoint.sh", "volume.yaml"),
        *("trainjob.yaml", "pytorchjob.yaml"),
    },
}
# The files of a question: what may differ when only its answer does.
OWN = {
    "license": {"LICENSE"},
    "task": {f"{PACKAGE}/{name}.py" for name in ("model", "data", "infer", "data")},
    "parallelism": {f"{PACKAGE}/parallel.py", "tests/test_ranks.py"},
    "checkpoint": {f"{PACKAGE}/checkpoint.py"},
    "tracker": {f"{PACKAGE}/run/tracker.py"},
    "cluster": set().union(*CLUSTER.values()),
}
EVERYWHERE = {"pyproject.toml", "README.md", ".cookiecutter.json"}
MODULES = {
    "": """
        __init__ __main__ config train optim model data infer parallel checkpoint
    """,
    "engine/": """
        __init__ archives buffers commands companions compilation compile_cache control
        decoding elastic fingerprint flops formats launch logs manifest memory metrics mirror
        network numbers object_storage optimizers pace profiling reading remote retrying rundir
        sampling settings shards snapshots staging state storage streams traces tracker tracking
        travel watch writing
    """,
    "workflow/": """
        __init__ allocations baseline checkpoint compile compile_trial diagnosis drill gates
        interval judging killing measuring noise plots processes profile report scale
        scale_worker sequence sizing
    """,
}
FILES = {
    *("pyproject.toml", "README.md", ".gitignore", ".gitattributes", ".pre-commit-config.yaml"),
    *(".github/dependabot.yml", ".github/workflows/ci.yml", "launch.sh", "LICENSE"),
    *(".cookiecutter.json", f"{PACKAGE}/workflow/report.html", "tests/test_ranks.py"),
    *(f"tests/{n}.py" for n in ("conftest", "test_sampling", "test_snapshots", "test_training")),
    *(f"{PACKAGE}/{at}{name}.py" for at, names in MODULES.items() for name in names.split()),
    *OWN["cluster"],
}


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by its path."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="session")
def renders(tmp_path_factory: pytest.TempPathFactory) -> dict[Answers, Path]:
    """Projects by their answers."""
    out = tmp_path_factory.mktemp("renders")
    return {
        answers: bake(out / "-".join(answers), **dict(zip(CHOICES, answers, strict=True)))
        for answers in RENDERS
    }


def test_any_two_answers_are_rendered_together() -> None:
    wanted = {
        ((i, a), (j, b))
        for (i, these), (j, those) in itertools.combinations(enumerate(CHOICES.values()), 2)
        for a, b in itertools.product(these, those)
    }
    assert set().union(*map(pairs, RENDERS)) == wanted
    assert {core[1:4] for core in RENDERS} == set(itertools.product(*list(CHOICES.values())[1:4]))


def test_every_render_has_exactly_its_files(renders: dict[Answers, Path]) -> None:
    for (license, _, parallelism, *_, cluster), project in renders.items():
        wanted = FILES - OWN["cluster"] | CLUSTER[cluster]
        if license == "none":
            wanted.remove("LICENSE")
        if parallelism == "single":
            wanted.remove("tests/test_ranks.py")
        assert set(tree(project)) == wanted, project


def test_every_file_is_valid(renders: dict[Answers, Path]) -> None:
    seen: set[tuple[str, bytes]] = set()  # most files are the same in all renders
    for project in renders.values():
        for name, content in tree(project).items():
            if (name, content) in seen:
                continue
            seen.add((name, content))
            text = content.decode("utf-8")
            assert text.endswith("\n") and not text.endswith("\n\n"), f"{project}/{name}"
            assert "\r" not in text
            if not name.endswith(".html"):  # a template of the rendered project's own
                assert not re.search(r"# \{[%#]|\{%|cookiecutter\.|@[A-Z_]+@", text), name
            if name.endswith(".py"):
                ast.parse(text)
            elif name.endswith(".toml"):
                tomllib.loads(text)
            elif name.endswith((".yml", ".yaml")):
                list(yaml.safe_load_all(text))
            elif name.endswith((".sh", ".sbatch")):
                subprocess.run(["bash", "-n"], input=content, check=True, timeout=120)
                assert (project / name).stat().st_mode & 0o100, name


def test_the_stamp_is_the_version_and_the_answers_only(
    renders: dict[Answers, Path], tmp_path: Path
) -> None:
    questions = [name for name in QUESTIONS if not name.startswith("_")]
    version = QUESTIONS["_template_version"]
    for answers, project in renders.items():
        stamp = json.loads((project / ".cookiecutter.json").read_text("utf-8"))
        assert stamp.pop("_template") == "cookiecutter-pytorch-training"
        assert stamp.pop("_version") == version
        assert list(stamp) == questions
        assert stamp.items() >= dict(zip(CHOICES, answers, strict=True)).items()
    old_context = bake(tmp_path, _template_version="0.0.1")  # as Cookiecutter replays it
    assert (
        json.loads((old_context / ".cookiecutter.json").read_text("utf-8"))["_version"] == version
    )
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and newest[1] == version, "CHANGELOG.md begins with the version of the template"


def test_every_render_is_linted_and_formatted(renders: dict[Answers, Path]) -> None:
    root = next(iter(renders.values())).parents[1]
    for command in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *command, "--no-cache", str(root)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_another_answer_changes_its_own_files_only(renders: dict[Answers, Path]) -> None:
    """A question's own files follow from its answer alone, all others from none."""
    contents: dict[tuple[str, str], set[bytes | None]] = {}
    trees = {answers: tree(project) for answers, project in renders.items()}
    owners = {name: place for place, own in enumerate(OWN.values()) for name in own}
    for answers, files in trees.items():
        for name in FILES - EVERYWHERE:
            answer = answers[owners[name]] if name in owners else ""
            contents.setdefault((name, answer), set()).add(files.get(name))
    assert {key for key, found in contents.items() if len(found) > 1} == set()
    for question, answers in CHOICES.items():
        for one, other in itertools.combinations(answers, 2):
            differing = [n for n in OWN[question] if contents[n, one] != contents[n, other]]
            assert differing, f"{one} and {other} are the same"


def test_neighbours_differ_in_what_an_update_may_touch(renders: dict[Answers, Path]) -> None:
    default = RENDERS[0]
    for place, question in enumerate(CHOICES):
        for answer in CHOICES[question]:
            here, there = (
                tree(renders[answers])
                for answers in (default, (*default[:place], answer, *default[place + 1 :]))
            )
            names = here.keys() | there.keys()
            changed = {name for name in names if here.get(name) != there.get(name)}
            assert changed <= OWN[question] | EVERYWHERE, answer
            assert bool(changed & OWN[question]) == (answer != default[place])


def test_all_answers_export_the_same_names(renders: dict[Answers, Path]) -> None:
    """The names that the rest imports have the same signature in every answer's file."""
    imported: dict[str, set[str]] = {}
    task = {f"{PACKAGE}/{name}.py" for name in ("data", "infer")}  # between them, their business
    for project in renders.values():
        for path in project.rglob("*.py"):
            if path.relative_to(project).as_posix() in task:
                continue
            for module, names in imports_of(path.read_text("utf-8")):
                imported.setdefault(module, set()).update(names)
        for name in ("train", "workflow/scale"):
            module = ast.parse((project / f"{PACKAGE}/{name}.py").read_text("utf-8"))
            imported.setdefault("parallel", set()).update(
                node.attr
                for node in ast.walk(module)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "parallel"
            )
    for question in ("task", "parallelism", "checkpoint", "tracker"):
        for name in OWN[question]:
            module = Path(name).stem
            found = set()
            for project in renders.values():
                if not name.startswith("src"):
                    continue
                body = ast.parse((project / name).read_text("utf-8")).body
                found.add(tuple(sorted(signatures(body, imported.get(module, set())))))
            assert len(found) <= 1, (name, found)
            inner = module.startswith("test_") or module == "formats"
            assert inner or (found and next(iter(found))), name


@functools.cache  # most files are the same in all renders
def imports_of(text: str) -> list[tuple[str, set[str]]]:
    """Modules that names are imported from, and the names."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    return [
        (node.module.split(".")[-1], {alias.name for alias in node.names})
        for node in nodes
        if node.module
    ]


def signatures(body: list[ast.stmt], names: set[str]) -> list[str]:
    """Functions with their parameters' names, and classes with their public methods."""
    result = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            result.append(f"{node.name}({', '.join(a.arg for a in node.args.args)})")
        elif isinstance(node, ast.ClassDef) and node.name in names - {"Spec"}:
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            public = [method for method in methods if method.name[0] != "_"]
            if node.name == "Checkpointer":  # a Recovery; the rest is its own business
                public = [method for method in methods if method.name == "_save"]
            calls = sorted(f"{m.name}({', '.join(a.arg for a in m.args.args)})" for m in public)
            result.append(f"{node.name}: {' '.join(calls)}")
    return result


def test_every_road_leads_to_the_same_tree(tmp_path: Path) -> None:
    api = tree(bake(tmp_path / "api"))
    assert api == tree(bake(tmp_path / "hooks", accept_hooks=True))
    for name, options in (("cli", []), ("cli-without-hooks", ["--accept-hooks", "no"])):
        outcome = bake_cli(tmp_path / name, *options)
        assert outcome.returncode == 0, outcome.stderr
        assert api == tree(tmp_path / name / "my-training-run")


def test_every_branch_of_the_template_is_rendered_and_left_out(tmp_path: Path) -> None:
    """Mark each branch and each answer's file in a copy; each must show in some renders only."""
    template = copy_template(tmp_path / "template")
    markers: dict[str, str] = {}

    def mark(where: str) -> str:
        marker = f"@branch-{len(markers)}@"
        markers[marker] = where
        return marker + "\n"

    for path in template.rglob("*"):
        if not path.is_file() or path.name == "cookiecutter.json":
            continue
        text = path.read_text("utf-8")
        branch = re.compile(r"^[ \t]*# \{% (?:if|elif|else)\b.*%\}\n", re.MULTILINE)
        text = branch.sub(lambda m, p=path: m[0] + mark(f"{p}: {m[0].strip()}"), text)
        if path.is_relative_to(template / "templates"):
            text = mark(f"{path}") + text
        path.write_text(text, "utf-8")
    assert len(markers) > 20

    seen: dict[str, int] = dict.fromkeys(markers, 0)
    conditional_names: dict[str, int] = {}
    for i, answers in enumerate(RENDERS):
        given = dict(zip(CHOICES, answers, strict=True))
        files = tree(bake(tmp_path / str(i), template=template, **given))
        for name in files:
            conditional_names[name] = conditional_names.get(name, 0) + 1
        for marker in set(re.findall(rb"@branch-\d+@", b"".join(files.values()))):
            seen[marker.decode()] += 1
    for marker, count in seen.items():
        assert 0 < count < len(RENDERS), f"{markers[marker]}: in {count} of {len(RENDERS)} renders"
    assert {n for n, count in conditional_names.items() if count < len(RENDERS)} == {
        "LICENSE",
        "tests/test_ranks.py",
        *OWN["cluster"],
    }


def test_template_python_is_python() -> None:
    """Before rendering, too: an editor, a linter and a reader see plain Python."""
    for path in [*(ROOT / "templates").rglob("*.py"), *(ROOT / PROJECT / "src").rglob("*.py")]:
        text = path.read_text("utf-8")
        ast.parse(text)
        marks = re.findall(r"# \{%.*?%\}", text)
        assert "{{" not in text, path
        assert all("include" in mark for mark in marks), f"{path}: {marks}"
    for command in (["check"], ["format", "--check"]):
        outcome = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "--no-cache",
                "--config",
                "pyproject.toml",
                ".",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_the_core_stays_small(renders: dict[Answers, Path]) -> None:
    for project in renders.values():
        core = {path.name: path.read_text("utf-8") for path in (project / PACKAGE).glob("*.py")}
        lines = {name: text.count("\n") for name, text in core.items()}
        assert sum(lines.values()) < 1200, lines
        assert lines["train.py"] <= 250


def test_the_longest_package_name_keeps_the_format(tmp_path: Path) -> None:
    project = bake(tmp_path, package_name="a" * 30, parallelism="fsdp")
    for command in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *command, "--no-cache", str(project)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert outcome.returncode == 0, outcome.stdout


def test_a_second_render_does_not_overwrite(tmp_path: Path) -> None:
    project = bake(tmp_path)
    (project / "README.md").write_text("mine\n", encoding="utf-8")
    outcome = bake_cli(tmp_path)
    assert outcome.returncode != 0
    assert (project / "README.md").read_text("utf-8") == "mine\n"
    assert not filecmp.dircmp(tmp_path, tmp_path).diff_files
