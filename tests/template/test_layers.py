"""Imports in a render run down only: no module knows one above it, and none knows itself.

Those inside functions count, too: they are there so that a command loads what it needs, not to hide
a circle. Those under TYPE_CHECKING do not: they are for types alone.
"""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import bake
from tests.template.test_render import FULLEST, SMALLEST

LAYERS = (
    {"__main__"},
    {"workflow"},
    # What is done with a model, by its settings.
    {
        "train",
        "empty_model",
        "resume",
        "validation",
        "adds_up",
        "infer",
        "program",
        "tokens",
        "huggingface",
    },
    {"config"},
    {"model", "gpt", "data", "source", "optim", "callbacks", "text"},
    {"compile", "profiler", "checkpoint", "run", "mixture", "sampling", "map_style", "ema"},
    {"distributed"},
    {
        "gather",
        "loss",
        "schedule",
        "errors",
        "files",
        "device",
        "permutation",
        "collate",
        "worker_errors",
    },
)
"""The top first; a module belongs to the layer of its room."""

# Imports inside functions that run up, each with its reason.
UPWARD = {
    ("callbacks", "infer"),  # a callback of the user's writes samples, as the command does
}


def imports(module: str, tree: ast.AST, is_package: bool, lazy: bool) -> Iterator[str]:
    """The modules of the package that a module imports, by dotted names.

    When it is imported, and, if `lazy`, when its functions are called.
    """
    here = module.split(".")
    package = here if is_package else here[:-1]
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            source = [*base, *(node.module or "").split(".")] if node.module else base
            yield ".".join(source)
            yield from (".".join([*source, alias.name]) for alias in node.names)
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(module, node, is_package, lazy)


def graph(package: Path, lazy: bool = True) -> dict[str, set[str]]:
    """Which modules of a package each of them imports; "" is the package itself."""
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        names[f"root.{name}".rstrip(".")] = path
    found = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text("utf-8"))
        wanted = set(imports(name, tree, path.name == "__init__.py", lazy)) & names.keys()
        # `from . import a` also names the package whose part is imported: that is no dependency.
        of_itself = {name.rpartition(".")[0], name, "root"}
        found[name.removeprefix("root").lstrip(".")] = {
            other.removeprefix("root.") for other in wanted - of_itself
        }
    return found


def layer_of(module: str) -> int:
    """The number of a module's layer, from the top."""
    room = module.split(".")[0]
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def upward(found: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports that run up."""
    return {
        (module, other)
        for module, others in found.items()
        for other in others
        if module and layer_of(other) < layer_of(module)
    }


@pytest.mark.parametrize("answers", [FULLEST, {}, SMALLEST], ids=["fullest", "default", "smallest"])
def test_imports_run_down_only_and_never_in_a_circle(
    tmp_path: Path, answers: dict[str, str]
) -> None:
    package = bake(tmp_path, **answers) / "src/my_training_run"
    at_import, at_all = graph(package, lazy=False), graph(package)
    assert len(at_all) > 25 and sum(map(len, at_all.values())) > 100
    assert upward(at_import) == set()
    assert upward(at_all) <= UPWARD
    for found in (at_import, at_all):
        graphlib.TopologicalSorter(found).prepare()  # CycleError names the modules of a circle


def test_an_import_that_runs_up_is_found(tmp_path: Path) -> None:
    """In a body, a class, a branch or a function; not for types alone."""
    sources = {
        "config.py": "from .train import State\n",
        "train.py": "if True:\n    from .distributed import stop\n",
        "distributed/__init__.py": "from ..errors import UserError\n",
        "distributed/stop.py": "class A:\n    from .. import config\n",
        "errors.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import run\n",
        "run.py": "def later():\n    from . import train\n",
    }
    (tmp_path / "distributed").mkdir()
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    found = graph(tmp_path, lazy=False)
    assert upward(found) == {("config", "train"), ("distributed.stop", "config")}
    assert upward(graph(tmp_path)) - upward(found) == {("run", "train")}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(found).prepare()
    circle = {"a.py": "from . import b\n", "b.py": "def f():\n    from .a import g\n"}
    (tmp_path / "circle").mkdir()
    for name, text in circle.items():
        (tmp_path / "circle" / name).write_text(text)
    graphlib.TopologicalSorter(graph(tmp_path / "circle", lazy=False)).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph(tmp_path / "circle")).prepare()


def test_the_smallest_render_trains_without_the_modules_of_many_ranks(tmp_path: Path) -> None:
    project = bake(tmp_path, **SMALLEST)
    options = ["--preset", "tiny", "--device", "cpu", "--train.steps", "2"]
    code = f"""
import sys
from my_training_run.__main__ import dispatch
assert dispatch(["train", *{options}]) == 0
print("torch.distributed.checkpoint" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1] == "False"
    assert (project / "runs/default/checkpoints/step_00000002").is_dir()
