"""Break the core of a render at many places, one at a time; see which no test notices.

python -m scripts.mutants [--count 200] [--seed 0] [--jobs 2] [--seconds 240] [--out FILE]

Only places in files whose code has changed since the results in `out`, or that new tests reach, are
tried again. What is found goes line by line into a file beside `out` (`.part`), which replaces it
at the end: a run that was cut off continues where it was.
docs/evidence/reliability.md has what no test noticed, with the reasons that
tests/stress/survivors.toml gives.

First each test runs once on a render that notes the lines that it reaches, in whatever process it
reaches them. Of all places that can be broken, `count` are drawn by the seed. For each, the tests
that reach it run: the render's own, then those of the template's that hold a render to its promises
(TEMPLATES), on renders that are broken likewise; the sharp and quick first, as many files as take
`seconds` together. Before them all run those that have noticed another breakage of the same file.
The next run tries more of them on what survived. All run in forks of this process, which has
imported torch and computed nothing. A mutant survives if no test fails and none reaches its time
limit. Whether it changes anything at all has to be judged by eye.

Neither mutmut 3.8 nor cosmic-ray 8.7 fits: mutmut changes no decorated function and nothing outside
functions, hence neither `validate` nor a module's constants; cosmic-ray runs one command anew for
each mutant, whose start takes longer than most of these tests, and does not choose among them.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "my_training_run"
CORE = r"(train|resume|validation|loss|optim|model|data|sampling|permutation"
CORE += r"|distributed/(parallel|shardable)|(checkpoint|run)/\w+)\.py"
# Not test_life, which runs the render's own tests once more.
TEMPLATES = "tests/project/test_*.py tests/stress/test_crash_points.py tests/stress/test_damage.py"
# These reach nearly everything and look at little of it: they run last.
BLUNT = re.compile("test_(entrances|fixtures|links|mistakes|tracker).py")
# Added to a package for the first run of the tests: whichever process imports it notes its lines.
TRACER = """
def _trace(package, out):
    import os, sys, threading
    seen, earlier = set(), sys.gettrace()  # of another render in this process
    def line(frame, event, argument):
        place = os.environ.get("PYTEST_CURRENT_TEST", ""), frame.f_code.co_filename, frame.f_lineno
        if place not in seen:
            seen.add(place)
            with open(out, "a") as file:
                file.write(f"{place[0]}\\t{place[1][len(package):]}\\t{place[2]}\\n")
        return line
    def call(frame, event, argument):
        if frame.f_code.co_filename.startswith(package):
            return line
        return earlier and earlier(frame, event, argument)
    threading.settrace(call)
    sys.settrace(call)
_trace(%r, %r)
"""
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
    return plain(tree), facts


def plain(tree: ast.AST) -> str:
    """A module as all mutants are written: without comments, a statement on a line."""
    return ast.unparse(tree) + "\n"


def code_digest(text: str) -> str:
    """What tells one version of a module's code from another, whatever its comments say."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
    return digest(plain(tree))


def digest(*texts: str) -> str:
    """What tells one version of these texts from another."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def drawn(texts: dict[str, str], count: int, seed: int) -> list[tuple[str, int]]:
    """Files and numbers of edits.

    Each is drawn by what it is, so that a change of one file draws nothing new in the others.
    """
    places, alike = [], Counter()
    for file, text in texts.items():
        lines = text.splitlines()
        for number, (node, kind, _) in enumerate(edits(ast.parse(text))):
            what = (file, kind, lines[node.lineno - 1].strip(), node.col_offset)
            alike[what] += 1
            places.append((digest(str(seed), *map(str, what), str(alike[what])), file, number))
    return [(file, number) for _, file, number in sorted(places)[:count]]


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


def side_by_side(jobs: int, work: list[Callable[[], None]]) -> None:
    """Do the work in so many processes."""
    workers = []
    for job in range(jobs):
        if (process := os.fork()) == 0:
            code = 1
            try:
                for part in work[job::jobs]:
                    part()
                code = 0
            finally:
                os._exit(code)
        workers.append(process)
    if any([os.waitpid(process, 0)[1] for process in workers]):
        raise SystemExit("a worker failed: its traceback is above")


class Tests:
    """The tests of a render (`own`) or of the template, and the lines that each reaches."""

    def __init__(self, project: Path, own: bool, cache: Path) -> None:
        self.project, self.own, self.cache = project, own, cache
        self.folder = project if own else ROOT
        patterns = ("tests/test_*.py",) if own else TEMPLATES.split()
        files = sorted(path for pattern in patterns for path in self.folder.glob(pattern))
        files = [path for path in files if own or path.stem != "test_life"]
        self.files = [str(path.relative_to(self.folder)) for path in files]
        # Lines are counted in the plain form, which has no comments.
        texts = [plain(ast.parse(text)) for text in core(project).values()]
        self.key = digest(TRACER, *texts)
        self.found: dict[str, Any] = {}

    def version(self, file: str) -> str:
        """What tells one version of a file of tests from another."""
        return digest((self.folder / file).read_text())

    def run(self, words: list[str], change: Callable[[Path], None], *plugins: object) -> int:
        """Run tests in this process, on renders whose package was changed; their exit code."""
        import pytest

        with tempfile.TemporaryDirectory() as scratch:
            folder = ROOT
            if self.own:
                folder = Path(scratch, "project")
                shutil.copytree(self.project, folder, ignore=shutil.ignore_patterns("__pycache__"))
                change(folder / "src" / PACKAGE)
                sys.path[:0] = [str(folder / "src"), str(folder / "tests")]
                os.environ["PYTHONPATH"] = str(folder / "src")
            else:
                sys.path.insert(0, str(ROOT))
                shared = importlib.import_module("tests.conftest")
                bake = shared.bake

                def bake_changed(*arguments: Any, **answers: Any) -> Path:
                    project = bake(*arguments, **answers)
                    change(next((project / "src").iterdir()))
                    return project

                shared.bake = bake_changed
            os.chdir(folder)
            options = ["-q", "-rfE", "-o", "addopts=", "-p", "no:cacheprovider"]
            options += ["-n", "0", "--basetemp", f"{scratch}/t"]
            return pytest.main([*options, *words], plugins=list(plugins))

    def trace(self, file: str) -> None:
        """Write down which lines of the core each test of a file reaches, and its seconds."""
        kept = self.cache / digest(self.key, file, self.version(file))
        if kept.exists():
            return
        seconds: Counter[str] = Counter()
        failed: set[str] = set()

        class Timing:
            def pytest_runtest_logreport(self, report: Any) -> None:
                seconds[report.nodeid] += report.duration
                failed.update({report.nodeid} if report.failed else ())

        with tempfile.TemporaryDirectory() as scratch:
            lines, log = Path(scratch, "lines"), Path(scratch, "log")

            def change(package: Path) -> None:
                for name, text in core(package.parents[1], package.name).items():
                    (package / name).write_text(plain(ast.parse(text)))
                with (package / "__init__.py").open("a") as init:
                    init.write(TRACER % (f"{package}/", str(lines)))

            def work() -> int:
                code = self.run([file], change, Timing())
                reached: dict[str, list[Any]] = {
                    name: [round(total, 2), []]
                    for name, total in seconds.items()
                    if name not in failed
                }
                for line in set(lines.read_text().splitlines()) if lines.exists() else ():
                    test, place, number = line.split("\t")
                    name, _, phase = test.rpartition(" ")
                    # What a fixture reaches is for all tests of the file.
                    for one in reached if phase == "(setup)" else {name} & set(reached):
                        reached[one][1].append([place, int(number)])
                kept.with_suffix(".part").write_text(json.dumps(reached))
                kept.with_suffix(".part").rename(kept)
                return code

            code = finished(forked(work, log), 1800)
            print(f"{file}: exit code {code}", flush=True)
            if code != 0:
                # Some look at the text of a module, which is written otherwise here: left out.
                print(log.read_text(errors="replace")[-2000:], flush=True)

    def read(self) -> None:
        """Take what `trace` has found."""
        for file in self.files:
            kept = self.cache / digest(self.key, file, self.version(file))
            if kept.exists():
                self.found[file] = json.loads(kept.read_text())

    def reaching(self, file: str, lines: tuple[int, int]) -> dict[str, tuple[float, list[str]]]:
        """The tests that reach these lines, by file of tests, the quickest first."""
        found = {}
        for name, tests in self.found.items():
            chosen = [
                (seconds, test)
                for test, (seconds, reached) in tests.items()
                if any(path == file and lines[0] <= line <= lines[1] for path, line in reached)
            ]
            if chosen:
                found[name] = (sum(one for one, _ in chosen), [test for _, test in sorted(chosen)])
        return dict(sorted(found.items(), key=lambda it: (bool(BLUNT.search(it[0])), it[1][0])))


def core(project: Path, package: str = PACKAGE) -> dict[str, str]:
    """The texts of the files of a render that are broken here."""
    source = project / "src" / package
    paths = {str(path.relative_to(source)): path for path in sorted(source.rglob("*.py"))}
    return {name: path.read_text() for name, path in paths.items() if re.fullmatch(CORE, name)}


def lines_of(text: str, number: int) -> tuple[int, int]:
    """The lines of an edit in the plain form of a module; outside of functions, all."""
    tree = ast.parse(plain(ast.parse(text)))
    node = list(edits(tree))[number][0]
    inside = any(
        isinstance(function, ast.FunctionDef)
        and function.body[0].lineno <= node.lineno <= function.end_lineno
        for function in ast.walk(tree)
    )
    return (node.lineno, node.end_lineno) if inside else (0, 10**9)


def attempt(
    every: list[Tests],
    file: str,
    number: int,
    known: dict[str, Any],
    sharp: set[str],
    seconds: float,
) -> dict[str, Any]:
    """Break one place and run the tests that reach it and have not yet been tried.

    Those in `sharp` run first, for a quarter of the seconds.
    """
    started, whole = time.monotonic(), core(every[0].project)[file]
    broken, facts = mutate(whole, number)
    lines = lines_of(whole, number)
    result = {"file": file, "number": number, "text": code_digest(whole), **facts}
    result |= {"noticed_by": None, "tried": dict(known.get("tried", {}))}

    def change(package: Path) -> None:
        path = package / file
        if path.exists() and path.read_text() == whole:
            path.write_text(broken)

    for tests in every:
        words, usual = [], 0.0
        for name, (_, reaching) in tests.reaching(file, lines).items():
            for test in reaching:
                cost = tests.found[name][test][0]
                if test in sharp and usual + cost <= seconds / 4:
                    words.append(test)
                    usual += cost
        if not result["noticed_by"]:
            result["noticed_by"] = first_to_notice(tests, words, usual, change)
    for tests in every:
        chosen = tests.reaching(file, lines)
        chosen = {
            name: found
            for name, found in chosen.items()
            if result["tried"].get(name) != tests.version(name)
        }
        if not chosen or result["noticed_by"]:
            continue
        sums = dict(zip(chosen, itertools.accumulate(it for it, _ in chosen.values()), strict=True))
        chosen = {n: it for n, it in chosen.items() if sums[n] <= seconds or n == next(iter(sums))}
        words = [test for _, names in chosen.values() for test in names]
        usual = sum(it for it, _ in chosen.values())
        result["noticed_by"] = first_to_notice(tests, words, usual, change)
        if not result["noticed_by"]:
            result["tried"] |= {name: tests.version(name) for name in chosen}
    result["seconds"] = round(time.monotonic() - started, 1)
    return result | {"date": time.strftime("%Y-%m-%d")}


def first_to_notice(
    tests: Tests, words: list[str], usual: float, change: Callable[[Path], None]
) -> str | None:
    """Run tests that usually take so many seconds on a broken render; which of them fails."""
    words = list(words)
    limit = 120 + 2 * usual
    while words:
        code, failed = outcome(tests, words, change, limit)
        if code == 0:
            return None
        if not failed:
            # The machine may be too busy: what is whole has to pass within the same limit.
            if outcome(tests, words, lambda package: None, limit)[0] != 0:
                return None
            return "time limit" if code is None else f"exit code {code}"
        # It may fail for what ran before it: it has to fail alone, and pass on what is whole.
        if (
            outcome(tests, [failed], change, limit)[0] != 0
            and outcome(tests, [failed], lambda package: None, limit)[0] == 0
        ):
            return failed
        words.remove(failed)
    return None


def outcome(
    tests: Tests, words: list[str], change: Callable[[Path], None], seconds: float
) -> tuple[int | None, str]:
    """Run tests on a render that was changed: the exit code (None: too late), the first failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        code = finished(forked(lambda: tests.run(["-x", *words], change), log), seconds)
        text = log.read_text(errors="replace") if code else ""
    said = re.findall("^(?:FAILED|ERROR) (.*)", text, re.M)
    return code, next((word for word in words for line in said if line.startswith(word)), "")


def untried(every: list[Tests], texts: dict[str, str], place: tuple[str, int], known: Any) -> bool:
    """Whether no test has noticed a place yet and some that reach it were not tried."""
    if known is None or known["noticed_by"]:
        return known is None
    lines = lines_of(texts[place[0]], place[1])
    return any(
        known["tried"].get(name) != tests.version(name)
        for tests in every
        for name in tests.reaching(place[0], lines)
    )


def read_results(out: Path) -> list[dict[str, Any]]:
    """What earlier runs found, in whatever version of the files; the newest come last."""
    found: list[dict[str, Any]] = []
    for file in (out, part_of(out)):
        lines = file.read_text().splitlines() if file.exists() else []
        found += [json.loads(line) for line in lines]
    return found


def part_of(out: Path) -> Path:
    """The file of a run that has not ended."""
    return out.with_name(f"{out.name}.part")


def results_in(out: Path, texts: dict[str, str]) -> dict[tuple[str, int], dict[str, Any]]:
    """What earlier runs found on files whose code is as it was, by place."""
    return {
        (one["file"], one["number"]): one
        for one in read_results(out)
        if code_digest(texts.get(one["file"], "")) == one["text"]
    }


def that_noticed(out: Path, file: str) -> set[str]:
    """The tests that have noticed breakages of a file, in whatever version."""
    found = read_results(out)
    return {one["noticed_by"] for one in found if one["file"] == file and one["noticed_by"]}


def main() -> int:
    """Break one place after the other; 1 if one of twenty goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/stress/results/mutants.jsonl")
    options = parser.parse_args()
    options.out = options.out.resolve()
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
    cache = ROOT / "build/mutants"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        project = bake(Path(folder), package_name=PACKAGE, tracker="none")
        texts = core(project)
        every = [Tests(project, own, cache) for own in (True, False)]
        side_by_side(
            options.jobs,
            [lambda t=t, f=f: t.trace(f) for t in every for f in t.files],
        )
        for tests in every:
            tests.read()
        places = drawn(texts, options.count, options.seed)
        known = results_in(options.out, texts)
        left = [place for place in places if untried(every, texts, place, known.get(place))]
        print(f"{len(left)} of {len(places)} places to try", flush=True)

        def work(place: tuple[str, int]) -> None:
            sharp = that_noticed(options.out, place[0])
            found = attempt(every, *place, known.get(place, {}), sharp, options.seconds)
            line = json.dumps(found) + "\n"
            with open(part_of(options.out), "a") as file:
                file.write(line)

        side_by_side(options.jobs, [lambda p=place: work(p) for place in left])
        known = results_in(options.out, texts)
        results = [known[place] for place in places]
    options.out.write_text("".join(json.dumps(result) + "\n" for result in results))
    part_of(options.out).unlink(missing_ok=True)
    survivors = [result for result in results if result["noticed_by"] is None]
    print(f"{len(results) - len(survivors)} of {len(results)} mutants noticed")
    for one in survivors:
        print(f"  {one['file']}:{one['line']} {one['kind']}: {one['before']}")
    return int(len(survivors) > len(results) / 20)


if __name__ == "__main__":
    sys.exit(main())
