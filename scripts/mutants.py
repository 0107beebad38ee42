"""Break the core of a render at many places, one at a time; see which no test notices.

python -m scripts.mutants [--count 200] [--seed 0] [--jobs 2] [--out build/mutants.json]

What was found is kept beside `out` line by line: a run that was cut off goes on where it was.

The default render's own tests run once with a trace of the lines that each reaches. Of all places
that can be broken, `count` are drawn by the seed. For each the tests run that reach it, quickest
first, then those that start processes, whose lines the trace does not see. What is left is tried by
those of the template's tests that hold this part of a render to its promises (ELSEWHERE), on
renders that are broken likewise. All run in forks of this process, which has imported torch and
computed nothing. A mutant survives if no test fails and none reaches its time limit. Whether it
changes anything at all has to be judged by eye.

Neither mutmut 3.8 nor cosmic-ray 8.7 fits: mutmut changes no decorated function and nothing outside
functions, hence neither `validate` nor a module's constants; cosmic-ray runs one command anew for
each mutant, whose start takes longer than most of these tests, and does not choose among them.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "my_training_run"
CORE = r"(train|loss|optim|model|data|sampling|distributed/parallel|(checkpoint|run)/\w+)\.py"
ELSEWHERE = {
    r"(train|loss|optim|model|data|sampling|\w+/parallel)\.py": "models data optimizer reference",
    r"run/bad_steps\.py": "optimizer",
    r"(train|checkpoint/\w+)\.py": "fixtures travel endings",
    r"(train|run/\w+)\.py": "metrics endings mistakes console logs",
}
OWN, TEMPLATES = "its own tests", "the template's tests"
OTHER_OPERATOR: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr},
    **{
        ast.BitOr: ast.BitAnd,
        ast.BitXor: ast.BitOr,
        ast.LShift: ast.RShift,
        ast.RShift: ast.LShift,
    },
}
Edit = tuple[ast.AST, str, Callable[[], object]]  # where, what it is called, what does it


def edits(tree: ast.AST) -> Iterator[Edit]:
    """All that can be broken in a module, in a fixed order.

    Texts and types are left alone, and so are presets and the defaults of settings: these are
    choices, of which no test can say that they are wrong.
    """
    skipped: set[int] = set()
    for node in ast.walk(tree):
        notes = [getattr(node, name, None) for name in ("annotation", "returns", "exc", "msg")]
        for part in [*notes, *getattr(node, "decorator_list", ())]:
            skipped |= {id(below) for below in ast.walk(part)} if part else set()
        if isinstance(node, ast.Call) and "log." in ast.unparse(node.func):
            skipped |= {id(below) for below in ast.walk(node)}
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            skipped |= {id(field.value) for field in node.body if isinstance(field, ast.AnnAssign)}
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PRESETS":
            skipped |= {id(below) for below in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER_OPERATOR:
            other = [OTHER_OPERATOR[type(node.ops[0])](), *node.ops[1:]]
            yield node, "comparison", lambda n=node, o=other: setattr(n, "ops", o)
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp):
            if kind := OTHER_OPERATOR.get(type(node.op)):
                yield node, "operator", lambda n=node, k=kind: setattr(n, "op", k())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value * 2 or 1
            yield node, "constant", lambda n=node, v=value: setattr(n, "value", v)
        if isinstance(node, ast.If | ast.IfExp | ast.While) and "TYPE" not in ast.unparse(
            node.test
        ):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield node.test, "condition", lambda n=node, t=negated: setattr(n, "test", t)
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for at, statement in enumerate(body if isinstance(body, list) else ()):
                call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
                if (call and "log." not in ast.unparse(statement.value.func)) or isinstance(
                    statement, ast.AugAssign | ast.Raise | ast.Continue | ast.Break
                ):
                    nothing = ast.copy_location(ast.Pass(), statement)
                    yield statement, "removed", lambda b=body, i=at, n=nothing: b.__setitem__(i, n)


def mutate(text: str, number: int) -> tuple[str, dict[str, Any]]:
    """A module with its edit of this number made, and what that is."""
    tree = ast.parse(text)
    node, kind, make = list(edits(tree))[number]
    before = text.splitlines()[node.lineno - 1].strip()
    make()
    ast.fix_missing_locations(tree)
    facts = {"line": node.lineno, "last_line": node.end_lineno, "kind": kind, "before": before}
    return ast.unparse(tree) + "\n", facts


def forked(work: Callable[[], int], log: Path) -> int:
    """Process id of a fork that does this work, in a session of its own."""
    if process := os.fork():
        return process
    os.setsid()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    code = 99
    try:
        code = int(work())
    finally:
        os._exit(code)


def pytest_in(folder: Path, words: list[str], plugins: tuple = ()) -> int:
    """Run tests in this process; their exit code."""
    import pytest

    os.chdir(folder)
    source = str(folder / "src")
    sys.path[:0] = [source, str(folder / "tests")] if folder != ROOT else [str(ROOT)]
    os.environ["PYTHONPATH"] = source
    with tempfile.TemporaryDirectory() as scratch:
        options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "--basetemp", f"{scratch}/t"]
        return pytest.main([*options, *words], plugins=list(plugins))


class Reached:
    """A plugin: the lines of the package that each test runs, and its seconds."""

    def __init__(self, package: Path, out: Path) -> None:
        self.package, self.out, self.found = str(package), out, {}

    def pytest_runtest_setup(self, item: Any) -> None:
        """Begin to trace."""
        self.lines, self.started = set(), time.perf_counter()

        def trace(frame: Any, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.startswith(self.package):
                return None
            self.lines.add((frame.f_code.co_filename[len(self.package) + 1 :], frame.f_lineno))
            return trace

        threading.settrace(trace)
        sys.settrace(trace)

    def pytest_runtest_teardown(self, item: Any) -> None:
        """Keep what was found."""
        sys.settrace(None)
        threading.settrace(None)
        seconds = time.perf_counter() - self.started
        self.found[item.nodeid] = {"seconds": seconds, "lines": sorted(self.lines)}
        self.out.write_text(json.dumps(self.found))


def tests_of(reached: dict[str, Any], file: str, text: str, facts: dict[str, Any]) -> list[str]:
    """The tests that reach a place, quickest first; outside functions, all of its file."""
    inside = any(
        isinstance(node, ast.FunctionDef)
        and node.body[0].lineno <= facts["line"] <= node.end_lineno
        for node in ast.walk(ast.parse(text))
    )
    last = facts["last_line"] if inside else 10**9
    first = facts["line"] if inside else 0
    chosen = [
        (found["seconds"], name)
        for name, found in reached.items()
        if any(path == file and first <= line <= last for path, line in found["lines"])
    ]
    return [name for _, name in sorted(chosen)]


def broken_elsewhere(file: str, whole: str, broken: str) -> int:
    """The template's own tests, on renders of which this file is broken where they have it."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    shared = importlib.import_module("tests.conftest")
    bake = shared.bake

    def bake_broken(*arguments: Any, **answers: Any) -> Path:
        project = bake(*arguments, **answers)
        (package,) = (project / "src").iterdir()
        if (package / file).exists() and (package / file).read_text() == whole:
            (package / file).write_text(broken)
        return project

    shared.bake = bake_broken
    names = " ".join(names for part, names in ELSEWHERE.items() if re.fullmatch(part, file))
    tests = [f"tests/project/test_{name}.py" for name in dict.fromkeys(names.split())]
    # The tests of breakages look for the text that they replace, which is written otherwise here.
    return pytest_in(ROOT, ["-o", "addopts=", "-k", "not breakage and not whole", *tests])


def finished(process: int, limit: float) -> int | None:
    """The exit code of a fork, None at the time limit; nothing that it started is left."""
    end = time.monotonic() + limit
    status = None
    while status is None and time.monotonic() < end:
        time.sleep(0.05)
        ended, code = os.waitpid(process, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status


def attempt(
    project: Path, reached: dict[str, Any], file: str, number: int, by: str
) -> dict[str, Any]:
    """Break one place; how that was noticed by the render's own tests (OWN) or the template's."""
    started, whole = time.monotonic(), (project / "src" / PACKAGE / file).read_text()
    broken, facts = mutate(whole, number)
    own = tests_of(reached, file, whole, facts)
    result = {"file": file, "number": number, "text": digest(whole), **facts}
    result |= {"reached_by": len(own), "tried": by, "noticed_by": None}
    with tempfile.TemporaryDirectory() as folder:
        copy, log = Path(folder) / "project", Path(folder) / "log"
        shutil.copytree(project, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "src" / PACKAGE / file).write_text(broken)
        usual = sum(reached[name]["seconds"] for name in own)
        ways: dict[str, tuple[float, Callable[[], int]]] = {
            TEMPLATES: (900, lambda: broken_elsewhere(file, whole, broken))
        }
        if by == OWN:
            ways = {"on ranks": (300, lambda: pytest_in(copy, ["tests/test_ranks.py"]))}
            if own:
                ways = {OWN: (120 + 5 * usual, lambda: pytest_in(copy, own))} | ways
        for way, (limit, work) in ways.items():
            if (code := finished(forked(work, log), limit)) != 0:
                failed = re.findall(
                    r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.M
                )
                last = "time limit" if code is None else f"exit code {code}"
                result["noticed_by"] = f"{way}: {failed[0] if failed else last}"
                break
    return result | {"seconds": round(time.monotonic() - started, 1)}


def needs(by: str, known: dict[str, Any] | None) -> bool:
    """Whether a place is to be tried by these tests."""
    return known is None or (known["noticed_by"] is None and by not in (OWN, known["tried"]))


def digest(text: str) -> str:
    """What tells one version of a file from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def results_in(part: Path, files: dict[str, Path]) -> dict[tuple[str, int], dict[str, Any]]:
    """What an earlier run found on files that are as they were, by place."""
    lines = part.read_text().splitlines() if part.exists() else []
    texts = {name: digest(path.read_text()) for name, path in files.items()}
    found = [json.loads(line) for line in lines]
    return {(one["file"], one["number"]): one for one in found if texts[one["file"]] == one["text"]}


def main() -> int:
    """Break one place after the other; 1 if one of twenty goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.json")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "COOKIECUTTER_CONFIG": os.devnull}
    sys.dont_write_bytecode = True
    from tests.conftest import bake

    for name in (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "sklearn.datasets",
        "tyro",
        "pytest",
    ):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        project, log = (
            bake(Path(folder), package_name=PACKAGE, tracker="none"),
            Path(folder) / "log",
        )
        package, found = project / "src" / PACKAGE, Path(folder) / "reached.json"
        plugin = Reached(package, found)
        code = finished(forked(lambda: pytest_in(project, ["tests"], (plugin,)), log), 3600)
        if code != 0:
            print(f"the tests of an unbroken render fail:\n{log.read_text()}")
            return 1
        reached = json.loads(found.read_text())
        files = {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
        places = [
            (name, number)
            for name, path in files.items()
            if re.fullmatch(CORE, name)
            for number in range(len(list(edits(ast.parse(path.read_text())))))
        ]
        drawn = random.Random(options.seed).sample(places, min(options.count, len(places)))
        part = options.out.with_suffix(".jsonl")
        failed = False
        for by in (OWN, TEMPLATES):
            known = results_in(part, files)
            left = [place for place in drawn if needs(by, known.get(place))]
            print(f"{len(left)} of {len(drawn)} left for {by}", flush=True)
            workers = []
            for job in range(options.jobs):
                if (process := os.fork()) == 0:
                    for place in left[job :: options.jobs]:
                        line = json.dumps(attempt(project, reached, *place, by)) + "\n"
                        with open(part, "a") as file:
                            file.write(line)
                    os._exit(0)
                workers.append(process)
            failed |= any([os.waitpid(process, 0)[1] for process in workers])
        known = results_in(part, files)
        results = [known[place] for place in drawn if place in known]
    survivors = [result for result in results if result["noticed_by"] is None]
    facts = {"seed": options.seed, "places": len(places), "broken": len(results)}
    facts |= {"noticed": len(results) - len(survivors), "survivors": survivors, "all": results}
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{facts['noticed']} of {len(results)} mutants noticed ({len(places)} places)")
    for one in survivors:
        print(f"  {one['file']}:{one['line']} {one['kind']}: {one['before']}")
    return int(failed or len(survivors) > len(results) / 20)


if __name__ == "__main__":
    sys.exit(main())
