"""Every combination of answers renders a clean, complete project, the same by every road."""

import ast
import filecmp
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import PROJECT, ROOT, bake, bake_cli, copy_template

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
CHOICES = {
    name: answers
    for name, answers in QUESTIONS.items()
    if isinstance(answers, list) and name[0] != "_"
}
Answers = tuple[str, ...]  # in the order of CHOICES
CORE = ("task", "parallelism", "checkpoint")


def named(answers: Answers) -> dict[str, str]:
    """The answers by their questions."""
    return dict(zip(CHOICES, answers, strict=True))


def pairs(answers: Answers) -> set[tuple[tuple[int, str], ...]]:
    """Every two of the answers."""
    return set(itertools.combinations(enumerate(answers), 2))


def choose_renders() -> list[Answers]:
    """Answers to render: not the whole product, but every pair of answers at least once.

    All neighbours of the defaults (one answer changed), the smallest and the fullest render, and
    every task with every parallelism and every checkpoint, whose other answers are those that
    bring the most new pairs.
    """
    default = tuple(answers[0] for answers in CHOICES.values())
    chosen = dict.fromkeys(
        (*default[:i], answer, *default[i + 1 :])
        for i, answers in enumerate(CHOICES.values())
        for answer in answers
    )
    chosen |= dict.fromkeys(tuple((named(default) | it).values()) for it in (SMALLEST, FULLEST))
    covered = set().union(*map(pairs, chosen))
    others = [answers if name not in CORE else [""] for name, answers in CHOICES.items()]
    for core in itertools.product(*(CHOICES[name] for name in CORE)):
        fixed = dict(zip(CORE, core, strict=True))
        varied = [tuple((named(rest) | fixed).values()) for rest in itertools.product(*others)]
        best = max(varied, key=lambda answers: len(pairs(answers) - covered))
        chosen[best] = None
        covered |= pairs(best)
    return list(chosen)


SMALLEST = {
    **{"license": "none", "parallelism": "single", "checkpoint": "torch_save"},
    **{"tracker": "none", "workflow": "baseline"},
}
FULLEST = {
    **{"parallelism": "fsdp", "storage": "object_store", "tracker": "mlflow"},
    **{"cluster": "kubernetes", "text": "tokenizer", "samples": "stream", "workflow": "full"},
}
RENDERS = choose_renders()
PACKAGE = "src/my_training_run"
MAP_STYLE = "samples/map_style.py"
Condition = Callable[[dict[str, str]], bool]


def ranks(answers: dict[str, str]) -> bool:
    """Whether a project can run on several processes."""
    return answers["parallelism"] != "single"


def stages(answers: dict[str, str]) -> bool:
    """Whether a project has the stages of the workflow behind the baseline."""
    return answers["workflow"] != "baseline"


def every(folder: str, names: str, suffix: str = ".py") -> list[str]:
    """Paths in a folder."""
    return [f"{folder}/{name}{suffix}" for name in names.split()]


# What every answer has to export, for somebody who writes another one.
EXPORTS = ROOT / "tests/template/exports.txt"
STAGE_FILES = (
    "chain interleaved compile compile_trial profile trace recovery drill processes report plots "
    "fit fake_tensors meter"
)
FULL_FILES = "compare expected stages tuning"
# Every file that only some renders have, and when.
CONDITIONAL: dict[str, Condition] = {
    "LICENSE": lambda a: a["license"] != "none",
    "launch.sh": ranks,
    "train.sbatch": lambda a: a["cluster"] == "slurm",
    "pytorchjob.yaml": lambda a: a["cluster"] == "kubernetes",
    "tests/test_ranks.py": ranks,
    **dict.fromkeys(every(PACKAGE, "mixture source"), lambda a: a["samples"] == "mixture"),
    f"{PACKAGE}/map_style.py": lambda a: a["samples"] == "stream",
    f"{PACKAGE}/distributed/shardable.py": lambda a: a["parallelism"] == "fsdp",
    f"{PACKAGE}/gpt.py": lambda a: (a["task"], a["text"]) == ("language_model", "tokenizer"),
    f"{PACKAGE}/text.py": lambda a: a["task"] == "language_model",
    **dict.fromkeys(
        every(PACKAGE, "tokens huggingface"),
        lambda a: (a["task"], a["text"]) == ("language_model", "tokenizer"),
    ),
    f"{PACKAGE}/run/tracker_adapter.py": lambda a: a["tracker"] != "none",
    f"{PACKAGE}/run/samples.py": lambda a: a["tracker"] != "none" or stages(a),
    "entrypoint.sh": lambda a: a["cluster"] == "kubernetes" and ranks(a),
    f"{PACKAGE}/workflow/report.html": stages,
    **dict.fromkeys(
        ("Dockerfile", ".dockerignore", "volume.yaml", "trainjob.yaml"),
        lambda a: a["cluster"] == "kubernetes",
    ),
    **dict.fromkeys(
        every(f"{PACKAGE}/workflow", "scale"),
        lambda a: stages(a) and ranks(a),
    ),
    **dict.fromkeys(
        every(f"{PACKAGE}/distributed", "world agreement buffers watchdog launch"), ranks
    ),
    f"{PACKAGE}/checkpoint/dcp.py": lambda a: a["checkpoint"] != "torch_save",
    f"{PACKAGE}/checkpoint/staging.py": lambda a: a["checkpoint"] == "dcp_async",
    f"{PACKAGE}/distributed/stragglers.py": lambda a: ranks(a) and a["cluster"] != "none",
    **dict.fromkeys(
        every(f"{PACKAGE}/checkpoint", "object_store store_publisher"),
        lambda a: a["storage"] == "object_store",
    ),
    **dict.fromkeys(
        every(f"{PACKAGE}/workflow", f"{STAGE_FILES} rank_stages"),
        stages,
    ),
    **dict.fromkeys(
        every(f"{PACKAGE}/workflow", FULL_FILES),
        lambda a: a["workflow"] == "full",
    ),
}
ALWAYS = {
    *(
        "pyproject.toml",
        "README.md",
        "AGENTS.md",
        ".gitignore",
        ".gitattributes",
        ".pre-commit-config.yaml",
    ),
    *(".github/dependabot.yml", ".github/workflows/ci.yml", ".cookiecutter.json"),
    *every(
        "tests",
        "conftest test_callbacks test_checkpoints test_data test_model test_sampling test_step "
        "test_training test_validation",
    ),
    *every(
        PACKAGE,
        "__init__ __main__ adds_up callbacks collate compile config data device ema "
        "empty_model errors files gather infer loss model optim permutation profiler program "
        "resume sampling schedule train validation worker_errors",
    ),
    f"{PACKAGE}/py.typed",
    *every(f"{PACKAGE}/distributed", "__init__ parallel stop"),
    *every(
        f"{PACKAGE}/checkpoint",
        "__init__ base checkpointer manifest paths publish reader storage tensors transfer verify "
        "writer",
    ),
    *every(
        f"{PACKAGE}/run",
        "__init__ bad_steps callback_runner directory hardware journal logs model_state "
        "source_code summary tracker",
    ),
    *every(f"{PACKAGE}/workflow", "__init__ baseline stage timing"),
}
FILES = ALWAYS | CONDITIONAL.keys()
# The questions whose answers a file follows from; all other files are the same in all renders.
RANKS_AND_CLUSTER = ("parallelism", "cluster")
OWNERS: dict[str, tuple[str, ...]] = {
    "LICENSE": ("license",),
    "launch.sh": ("parallelism",),
    "AGENTS.md": ("parallelism",),
    "tests/test_ranks.py": ("parallelism",),
    **dict.fromkeys(every(PACKAGE, "infer callbacks optim"), ("task",)),
    **dict.fromkeys(every(PACKAGE, "data source"), ("task", "samples")),
    **dict.fromkeys(every(PACKAGE, "sampling map_style mixture"), ("samples",)),
    **dict.fromkeys(every(PACKAGE, "model gpt text tokens huggingface"), ("task", "text")),
    **dict.fromkeys(
        every(
            f"{PACKAGE}/distributed",
            "parallel shardable world agreement buffers watchdog launch",
        ),
        ("parallelism",),
    ),
    **dict.fromkeys(every(f"{PACKAGE}/distributed", "__init__ stragglers"), RANKS_AND_CLUSTER),
    **dict.fromkeys(every(f"{PACKAGE}/checkpoint", "reader writer dcp staging"), ("checkpoint",)),
    **dict.fromkeys(
        every(f"{PACKAGE}/checkpoint", "storage paths object_store store_publisher"),
        ("storage",),
    ),
    **dict.fromkeys(every(f"{PACKAGE}/run", "tracker tracker_adapter"), ("tracker",)),
    f"{PACKAGE}/run/samples.py": ("tracker", "workflow"),
    **dict.fromkeys(
        every(f"{PACKAGE}/workflow", f"{STAGE_FILES} {FULL_FILES}"),
        ("workflow",),
    ),
    f"{PACKAGE}/workflow/__init__.py": ("workflow",),
    f"{PACKAGE}/workflow/report.html": ("workflow",),
    **dict.fromkeys(
        every(f"{PACKAGE}/workflow", "scale rank_stages"),
        ("workflow", "parallelism"),
    ),
    **dict.fromkeys(
        (
            *("train.sbatch", ".dockerignore", "entrypoint.sh", "volume.yaml"),
            *("trainjob.yaml", "pytorchjob.yaml"),
        ),
        RANKS_AND_CLUSTER,
    ),
    # Its image has the client of an object store.
    "Dockerfile": (*RANKS_AND_CLUSTER, "storage"),
}
# What any answer may change; the rendered tests, besides, as they test what is there.
EVERYWHERE = {"pyproject.toml", "README.md", ".cookiecutter.json"}


def own(question: str) -> set[str]:
    """The files that an answer to a question may change."""
    tests = {name for name in FILES if name.startswith("tests/")}
    return {name for name, questions in OWNERS.items() if question in questions} | tests


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by its path."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="session")
def renders(tmp_path_factory: pytest.TempPathFactory) -> dict[Answers, Path]:
    """Projects by their answers."""
    out = tmp_path_factory.mktemp("renders")
    return {answers: bake(out / "-".join(answers), **named(answers)) for answers in RENDERS}


def test_any_two_answers_are_rendered_together() -> None:
    wanted = {
        ((i, a), (j, b))
        for (i, these), (j, those) in itertools.combinations(enumerate(CHOICES.values()), 2)
        for a, b in itertools.product(these, those)
    }
    assert set().union(*map(pairs, RENDERS)) == wanted
    cores = {tuple(named(answers)[name] for name in CORE) for answers in RENDERS}
    assert cores == set(itertools.product(*(CHOICES[name] for name in CORE)))


def test_every_render_has_exactly_its_files(renders: dict[Answers, Path]) -> None:
    for answers, project in renders.items():
        wanted = ALWAYS | {name for name, when in CONDITIONAL.items() if when(named(answers))}
        assert set(tree(project)) == wanted, project


def test_instructions_for_agents_name_what_is_there(renders: dict[Answers, Path]) -> None:
    for project in renders.values():
        text = (project / "AGENTS.md").read_text("utf-8")
        assert len(text.splitlines()) <= 40
        for name in re.findall(r"`([\w/]+(?:\.py|\.sh|/))`", text):
            places = (project, project / PACKAGE)
            assert name == "runs/" or any((place / name).exists() for place in places), name
        for command in re.findall(r"-m my_training_run (\w+)", text):
            assert command in ("train", "baseline")


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
    assert "/blob/v0.0.1/" not in (old_context / "README.md").read_text("utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and newest[1] == version, "CHANGELOG.md begins with the version of the template"


def test_every_render_is_linted_and_formatted(renders: dict[Answers, Path]) -> None:
    root = next(iter(renders.values())).parents[1]
    for command in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *command, "--no-cache", str(root)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_a_file_follows_from_the_answers_to_its_own_questions(
    renders: dict[Answers, Path],
) -> None:
    contents: dict[tuple[str, ...], set[bytes | None]] = {}
    for answers, project in renders.items():
        files = tree(project)
        for name in FILES - EVERYWHERE:
            if not name.startswith("tests/"):
                key = (name, *(named(answers)[question] for question in OWNERS.get(name, ())))
                contents.setdefault(key, set()).add(files.get(name))
    assert {key for key, versions in contents.items() if len(versions) > 1} == set()


def test_neighbours_differ_in_what_an_update_may_touch(renders: dict[Answers, Path]) -> None:
    default = RENDERS[0]
    before = tree(renders[default])
    for i, (question, choices) in enumerate(CHOICES.items()):
        for answer in choices[1:]:
            after = tree(renders[(*default[:i], answer, *default[i + 1 :])])
            names = before.keys() | after.keys()
            changed = {name for name in names if before.get(name) != after.get(name)}
            assert changed <= own(question) | EVERYWHERE, answer
            # In a render without a cluster only the cluster's own files could tell.
            assert changed - EVERYWHERE, answer


def test_all_answers_export_the_same_names(renders: dict[Answers, Path]) -> None:
    """What other files import from an answer's file has one signature in all answers."""
    answered = {name for name in OWNERS if name.endswith(".py") and name.startswith(PACKAGE)}
    signatures: dict[tuple[str, str], dict[str, Path]] = {}
    for project in renders.values():
        for path in (project / PACKAGE).rglob("*.py"):
            name = path.relative_to(project).as_posix()
            for module, imported in imports_of(path):
                target = module.relative_to(project).as_posix()
                if target in answered and OWNERS.get(name) != OWNERS[target]:
                    for symbol in imported:
                        found = signature(module, symbol)
                        signatures.setdefault((target, symbol), {})[found] = project
    assert len(signatures) > 30
    assert {key: found for key, found in signatures.items() if len(found) > 1} == {}
    lines: list[str] = []
    file = ""
    for target, symbol in sorted(signatures):
        if target != file:
            file = target
            lines += ["", target.removeprefix(f"{PACKAGE}/")]
        lines.append(f"    {next(iter(signatures[target, symbol]))}")
    listed = EXPORTS.read_text("utf-8")
    expected = listed.partition("\n\n")[0] + "\n" + "\n".join(lines) + "\n"
    if os.environ.get("WRITE_EXPORTS"):
        EXPORTS.write_text(expected)
    assert listed == expected, "WRITE_EXPORTS=1 lets this test write the list"


class Source:
    """A file's syntax tree: its relative imports, and the attributes of its names."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.imports: list[ast.ImportFrom] = []
        self.attributes: dict[str, set[str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                self.imports.append(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self.attributes.setdefault(node.value.id, set()).add(node.attr)


parsed = functools.cache(Source)  # most files are the same in all renders


@functools.cache
def imports_of(path: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """The modules of the same package that a file imports from, with the names.

    Of a module that is imported whole, the names are its attributes, as in `parallel.wrap`.
    """
    result, source = [], parsed(path.read_text("utf-8"))
    for node in source.imports:
        folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        names = [alias.name for alias in node.names]
        for name in names if folder.is_dir() else ():
            if (module := folder / f"{name}.py").exists():
                result.append((module, tuple(source.attributes.get(name, ()))))
        module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        result.append((module, tuple(n for n in names if not (folder / f"{n}.py").exists())))
    return result


@functools.cache
def signature(module: Path, name: str) -> str:
    """A function's required parameters, or a class's name, wherever it is defined."""
    for node in parsed(module.read_text("utf-8")).tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            required = len(node.args.args) - len(node.args.defaults)
            return f"{name}({', '.join(a.arg for a in node.args.args[:required])})"
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"class {name}"
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(it, ast.Name) and it.id == name for it in targets):
            return f"value {name}"
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            for origin, names in imports_of(module):
                if name in names:
                    return signature(origin, name)
            return f"imported {name}"
    raise AssertionError(f"{module} has no {name}")


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

    everywhere = {template / "templates" / MAP_STYLE}  # streams add to it
    for path in template.rglob("*"):
        if not path.is_file() or path.name == "cookiecutter.json":
            continue
        text = path.read_text("utf-8")
        branch = re.compile(r"^[ \t]*# \{% (?:if|elif|else|macro)\b.*%\}\n", re.MULTILINE)
        text = branch.sub(lambda m, p=path: m[0] + mark(f"{p}: {m[0].strip()}"), text)
        of_answer = path.is_relative_to(template / "templates") and path not in everywhere
        if of_answer and path.name != "README.md":  # which has macros only, marked above
            text = mark(f"{path}") + text
        path.write_text(text, "utf-8")
    assert len(markers) > 20

    seen: dict[str, int] = dict.fromkeys(markers, 0)
    conditional_names: dict[str, int] = {}
    for i, answers in enumerate(RENDERS):
        files = tree(bake(tmp_path / str(i), template=template, **named(answers)))
        for name in files:
            conditional_names[name] = conditional_names.get(name, 0) + 1
        for marker in set(re.findall(rb"@branch-\d+@", b"".join(files.values()))):
            seen[marker.decode()] += 1
    for marker, count in seen.items():
        assert 0 < count < len(RENDERS), f"{markers[marker]}: in {count} of {len(RENDERS)} renders"
    partial = {name for name, count in conditional_names.items() if count < len(RENDERS)}
    assert partial == set(CONDITIONAL)


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


def test_the_longest_package_name_keeps_the_format(tmp_path: Path) -> None:
    project = bake(tmp_path, package_name="a" * 30, parallelism="fsdp")
    for command in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *command, "--no-cache", str(project)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert outcome.returncode == 0, outcome.stdout


PASTED = """
import os
from typing import List, Optional
class thing( object ) :
    def go(self,x : Optional[List[int]]=None) :
        if x == None : x = []; print("a long line: LONG", os.sep)
        return x
""".replace("LONG", "and on " * 20)


def test_pasted_code_need_not_be_polished(tmp_path: Path) -> None:
    """In the files that are the user's own, where ruff reports errors only."""

    def found(*command: str) -> tuple[int, str]:
        command = (sys.executable, "-m", "ruff", *command, "--no-cache", str(project))
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=300)
        return outcome.returncode, outcome.stdout

    project = bake(tmp_path)
    shutil.copytree(ROOT / "tests/project/own/nanogpt", project / PACKAGE, dirs_exist_ok=True)
    own = [project / PACKAGE / f"{name}.py" for name in ("model", "data", "optim", "infer")]
    for path in (*own, project / PACKAGE / "callbacks.py"):
        whole = path.read_text("utf-8")
        path.write_text(whole + PASTED)
        assert (found("check")[0], found("format", "--check")[0]) == (0, 0), found("check")
        for wrong, rule in (("undefined", "F821"), ("def f(a=[]): pass", "B006"), ("x = (", "E9")):
            path.write_text(f"{whole}\n{wrong}\n")
            code, text = found("check")
            assert code == 1 and (rule in text or "invalid-syntax" in text), (path, rule, text)
        path.write_text(whole)
    with open(project / PACKAGE / "train.py", "a") as file:
        file.write(PASTED)
    assert (found("check")[0], found("format", "--check")[0]) == (1, 1)


def test_a_second_render_does_not_overwrite(tmp_path: Path) -> None:
    project = bake(tmp_path)
    (project / "README.md").write_text("mine\n", encoding="utf-8")
    outcome = bake_cli(tmp_path)
    assert outcome.returncode != 0
    assert (project / "README.md").read_text("utf-8") == "mine\n"
    assert not filecmp.dircmp(tmp_path, tmp_path).diff_files
