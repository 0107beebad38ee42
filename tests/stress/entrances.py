"""Files that commands read, changed at random: a command does its work or says in a line why not.

A run directory, a checkpoint, a file of weights or data may come from anybody. Each kind of file is
changed a thousand times, and each command that reads it is run on each mutant: forked from a
process that has imported everything, with little memory and little time. All commands of a mutant
share a fork; every tenth mutant, and any on which something ends oddly, has one for each command.
A command must end well, or with one line that begins with "error: ". A traceback, a
hang, a process started, or a write outside of the folder it works in is a violation.
"""

import contextlib
import copy
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.common import render
from tests.forked import settle

from . import mutations
from .common import Findings, run_topic
from .forked_jobs import _quiet
from .storm import import_all

PROMISE = "{}: each command that reads it works, or prints a one-line error"
OUTSIDE = "no command starts a process or writes outside of its folder"
NOTICED = "code that breaks this promise is detected"
TEXT, IMAGES = "entrances_text", "entrances_images"
ANSWERS: dict[str, dict[str, str]] = {
    TEXT: {"task": "language_model", "checkpoint": "dcp", "storage": "object_store"},
    IMAGES: {"task": "image_classifier", "checkpoint": "torch_save"},
}
MUTANTS, FEW = 1000, 4
FIRST, APART = 3 * FEW, 10
"""How many mutants, and every which of the others, have a process of its own for each command."""
VICTIM = b'{"victim": 1}\n'
PARSED: dict[str, Any] = {}  # the options of each command
MEMORY = 1 << 30  # bytes of address space that a command may ask for
SECONDS = 20  # of computing that it may take
PATIENCE = 120.0  # seconds until one that computes nothing counts as a hang
SHORT, BROKEN, HARMED = 77, 70, 71  # exit codes
LONGEST = 20_000  # characters of an error's line

# Small, whatever a config.json says: to train as long as it asks for is no fault.
SMALL = "--device cpu --train.global-batch-size 4 --train.micro-batch-size 4 --train.steps 1 "
SMALL += "--train.validate-samples 4 --train.loader-workers 0 --compile.mode none --profile.every 0"
MODEL = "--model.layers 1 --model.width 16 --model.heads 2 --data.context 16"
TINY = f"train --preset tiny {SMALL} --train.log-every 1 --checkpoint.every 0 "
ON = {TEXT: f"{MODEL} --data.path texts", IMAGES: "--data.path images"}
CHECKPOINT = {
    name: (
        "verify --run-dir run",
        "export --run-dir run --to out.pt",
        "infer --run-dir run --device cpu " + of_task,
        f"{TINY} {ON[name]} --run-dir other --init-from run",
        f"{TINY} {ON[name]} --run-dir run --train.steps 4",
    )
    for name, of_task in ((TEXT, "--tokens 2"), (IMAGES, "--samples 1"))
}
RUN = (
    "report --run-dir run",
    f"{TINY} {ON[TEXT]} --run-dir run --train.steps 3",
    f"{TINY} {ON[TEXT]} --run-dir run --train.steps 4",
    "compare run run",
)
STEP = "run/checkpoints/step_00000003"


@dataclass(frozen=True)
class Entrance:
    """One kind of file: where it lies, and the commands that read it, in this order."""

    name: str
    package: str
    files: tuple[str, ...]
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ("run", "texts")
    """What else the commands want in their folder."""


STAGES = ("baseline", "compile", "profile", "checkpoint")
PICTURES = ("bmp", "gif", "jpg", "png", "tif", "webp")
ENTRANCES = (
    Entrance(
        "config.json",
        TEXT,
        ("run/config.json",),
        (
            f"train --config run/config.json {SMALL} {ON[TEXT]} --run-dir given",
            *CHECKPOINT[TEXT][:4],
            *RUN[:2],
            RUN[3],
        ),
    ),
    Entrance("status.json", TEXT, ("run/status.json",), RUN),
    Entrance("metrics.jsonl", TEXT, ("run/metrics.jsonl",), RUN),
    Entrance(".lock", TEXT, ("run/.lock",), (RUN[0], RUN[2])),
    Entrance(
        "workflow/*.json",
        TEXT,
        tuple(f"run/workflow/{stage}.json" for stage in (*STAGES, "recommended")),
        (RUN[0], RUN[3], f"workflow --preset tiny {SMALL} {ON[TEXT]} --run-dir run"),
    ),
    Entrance("manifest.json", TEXT, (f"{STEP}/manifest.json",), CHECKPOINT[TEXT]),
    Entrance(
        ".metadata and the files that it names",
        TEXT,
        (f"{STEP}/.metadata", f"{STEP}/.metadata", f"{STEP}/__0_0.distcp"),
        CHECKPOINT[TEXT],
    ),
    Entrance(
        ".pt",
        IMAGES,
        (f"{STEP}/state.pt",),
        CHECKPOINT[IMAGES],
        ("run", "images"),
    ),
    Entrance(
        ".pt, exported",
        TEXT,
        ("x.pt",),
        (f"{TINY} {ON[TEXT]} --run-dir other --init-from x.pt", "export --source x.pt --to copy"),
        ("texts",),
    ),
    Entrance(
        ".safetensors",
        TEXT,
        ("x.safetensors",),
        (f"{TINY} {ON[TEXT]} --run-dir other --init-from x.safetensors",),
        ("texts",),
    ),
    Entrance(
        ".bin of tokens",
        TEXT,
        ("tokens/train.bin", "tokens/val.bin"),
        (f"{TINY} {MODEL} --data.path tokens --data.vocabulary 50 --run-dir other",),
        ("tokens",),
    ),
    Entrance(
        "images",
        IMAGES,
        (*(f"images/cat/1.{ending}" for ending in PICTURES), "digits.npz"),
        (
            f"{TINY} {ON[IMAGES]} --run-dir other",
            f"{TINY} --data.path digits.npz --run-dir another",
            CHECKPOINT[IMAGES][2],
        ),
        ("run", "images", "digits.npz"),
    ),
    Entrance(
        "text",
        TEXT,
        ("texts/b.txt",),
        (f"{TINY} {ON[TEXT]} --run-dir other", CHECKPOINT[TEXT][2]),
    ),
)


@dataclass(frozen=True)
class Case:
    """A mutant to be tried, by its number."""

    entrance: Entrance
    number: int
    folder: Path
    """Where `prepare` has left what the commands want, by package."""
    together: bool = False
    """Whether all commands are tried in one process first; what is odd then, each in its own."""
    sabotage: Callable[[str], None] | None = None
    patience: float = PATIENCE


def attempt(findings: Findings) -> None:
    """Every entrance, then code that is broken on purpose."""
    packages(findings.folder)
    cases = [
        Case(entrance, number, findings.folder, number >= FIRST and number % APART > 0)
        for at, entrance in enumerate(ENTRANCES)
        # In part: of the forms that any file can take (the first) and of random changes.
        for number in (range(at % 3, 3 * FEW, 3) if findings.bounded else range(MUTANTS))
    ]
    outcomes: Counter[str] = Counter()
    with pool() as workers:
        for case, found in workers.imap_unordered(tried, cases, chunksize=4):
            problems = [text for kind, text in found if kind == "violation"]
            mine = findings.tally(PROMISE.format(case.entrance.name), "mutants")
            mine.count("; ".join(problems) or None)
            harm = [text for kind, text in found if kind == "harm"]
            findings.tally(OUTSIDE, "mutants").count("; ".join(harm) or None)
            outcomes.update(kind for kind, _ in found)
        for sabotage, (name, numbers) in BREAKS.items():
            entrance = next(it for it in ENTRANCES if it.name == name)
            broken = [Case(entrance, n, findings.folder, True, sabotage, 15.0) for n in numbers]
            seen = {kind for _, found in map(tried, broken) for kind, _ in found}
            problem = None if seen & {"violation", "harm"} else f"nothing noticed of {sabotage}"
            findings.tally(NOTICED, "ways to break it").count(problem)
    findings.figures["commands"] = sum(outcomes.values())
    for kind in ("done", "refused", "out of memory", "out of time"):
        findings.figures[f"commands: {kind}"] = outcomes[kind]


def pool() -> Any:
    """A worker for each core; each forks a process for each command."""
    return multiprocessing.get_context("fork").Pool(os.cpu_count())


def packages(folder: Path) -> None:
    """Render, import all that commands need, and leave in `folder` what they read."""
    for name, answers in ANSWERS.items():
        (folder / name).mkdir()
        source = render(
            folder / name,
            package_name=name,
            parallelism="single",
            tracker="none",
            workflow="full",
            **answers,
        )
        sys.path.insert(0, str(source))
    import_all(ANSWERS)
    for name in ANSWERS:
        lazily = in_a_fork(lambda name=name: prepare(name, folder / name / "base"))
        for module in json.loads(lazily):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        parse_ahead(name)
    platform.uname().processor  # noqa: B018 - it starts a process, once
    with contextlib.chdir(folder):
        draw_once(TEXT)
    settle()


def parse_ahead(package: str) -> None:
    """Read the options of each command, once; a config.json among them is read each time."""
    main = importlib.import_module(f"{package}.__main__")
    parse = main.parse

    def keep(*given: Any) -> None:
        raise Kept(parse(*given))

    main.parse = keep
    for line in {line for it in ENTRANCES if it.package == package for line in it.commands}:
        if "--config" not in line:
            try:
                main.dispatch(line.split())
            except Kept as kept:
                (PARSED[line],) = kept.args
    main.parse = parse


class Kept(Exception):
    """The options of a command."""


def draw_once(package: str) -> None:
    """Draw the report's pictures of the same figures once, and compile its template once."""
    plots = importlib.import_module(f"{package}.workflow.plots")
    draw, drawn = plots.picture, {}

    def picture(title: str, paint: Callable[..., None], *figures: Any) -> tuple[str, str | None]:
        key = f"{title} {figures}"
        if key not in drawn:
            drawn[key] = draw(title, paint, *figures)
        return drawn[key]

    plots.picture = picture
    compiled, compile_ = {}, Environment.compile

    def compile_once(self: Environment, source: str, *rest: Any) -> Any:
        if source not in compiled:
            compiled[source] = compile_(self, source, *rest)
        return compiled[source]

    Environment.compile = compile_once
    report = importlib.import_module(f"{package}.workflow.report")
    report.publish_report(Path(package) / "base/run").unlink()


def in_a_fork(action: Callable[[], str]) -> str:
    """What a function returns, called in a fork: nothing may be computed before others are."""
    out, into = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(into, action().encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(BROKEN)
    os.close(into)
    with open(out, encoding="utf-8") as file:
        text = file.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("what is to be changed could not be made: see above")
    return text


def prepare(package: str, base: Path) -> str:
    """Everything that the commands of a package read, whole; names of modules it took."""
    base.mkdir()
    os.chdir(base)
    before = {*sys.modules}
    if package == IMAGES:
        make_images()
    else:
        make_texts()
    dispatch = importlib.import_module(f"{package}.__main__").dispatch
    _quiet(base.with_name("log"))
    dispatch(f"{TINY} {ON[package]} --run-dir run --train.steps 3".split())
    for ending in ("pt", "safetensors"):
        dispatch(f"export --run-dir run --to x.{ending}".split())
    if package == TEXT:
        make_stages(package)
    commands = {line: it for it in ENTRANCES if it.package == package for line in it.commands}
    stub_stages(package)
    shutil.copytree(base, base.with_name("once"))
    os.chdir(base.with_name("once"))
    for line in commands:  # what is imported only when it is needed, once for all
        for path in ("other", "another", "given", "copy", "out.pt"):
            remove(Path(path))
        assert dispatch(line.split()) == 0, line
    return json.dumps(sorted({*sys.modules} - before))


def make_texts() -> None:
    """Text and tokens."""
    Path("texts").mkdir()
    for name in "abc":
        Path(f"texts/{name}.txt").write_text("Was ever woman in this humour wooed? " * 40, "utf-8")
    Path("tokens").mkdir()
    for name in ("train", "val"):
        Path(f"tokens/{name}.bin").write_bytes(bytes(n % 50 * (1 - n % 2) for n in range(4000)))


def make_images() -> None:
    """Small pictures in every format, and the same as arrays."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        Path(f"images/{kind}").mkdir(parents=True)
        for number in range(3):
            for ending in PICTURES:
                pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(f"images/{kind}/{number}.{ending}")
    images = rng.integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.savez("digits.npz", images=images, labels=np.arange(20) % 3)


def make_stages(package: str) -> None:
    """What each stage of the workflow leaves behind."""
    from tests.workflow.test_workflow import FIGURES

    stages, main = (
        importlib.import_module(f"{package}.{n}") for n in ("workflow.stage", "__main__")
    )
    words = f"--preset tiny {SMALL} {ON[package]} --run-dir run".split()
    config = main.parse("workflow", stages.StageConfig, words)
    factor = [1.2, 1.1, 1.3]
    found = {"compile.mode": {"value": "full", "text": "--compile.mode full (compile)"}}
    rest = {"factor": factor, "settings": ["--that"], "file": "recommended.toml"}
    more = {"checkpoint": {"recommended": found}, "recommended": rest}
    for name in (*STAGES, "recommended"):
        stage = stages.Stage(name, config)
        stage.figures |= FIGURES.get(name, {}) | more.get(name, {})
        stage.check("c", None, measured="1 < 2", wanted="<b>", advice="try --that")
        importlib.import_module(f"{package}.workflow.chain").advise(stage, "more")
        stage.close()


def stub_stages(package: str) -> None:
    """A stage that is to be measured again passes without."""
    chain = importlib.import_module(f"{package}.workflow.chain")
    chain.run_stage = lambda *arguments: {"status": "pass", "figures": {}}
    chain.time_steps = lambda settings: {"given": [1.2] * 8, "recommended": [1.0] * 8}


def tried(case: Case) -> tuple[Case, list[tuple[str, str]]]:
    """Make a mutant, and run each command on it; kind and description of each outcome."""
    base, place = case.folder / case.entrance.package / "base", case.folder / f"in-{os.getpid()}"
    rng = random.Random(f"{case.entrance.name} {case.number}")
    file, victim = rng.choice(case.entrance.files), place / "victim"
    work = place / "work"
    remove(place)
    work.mkdir(parents=True)
    victim.write_bytes(VICTIM)
    for name in {*case.entrance.needs, file.partition("/")[0]}:
        copy = shutil.copytree if (base / name).is_dir() else shutil.copy
        copy(base / name, work / name)
    content = (work / file).read_bytes()
    what = mutations.put(work / file, content, case.number, rng, victim)
    if rng.random() < 0.8 and file.startswith(STEP):
        seal(case.entrance.package, work / STEP)
    if case.together:
        outputs = [place / f"output-{number}" for number, _ in enumerate(case.entrance.commands)]
        codes = all_ended(case, work, outputs)
        texts = [path.read_text("utf-8", "backslashreplace") for path in outputs[: len(codes)]]
        each = zip(case.entrance.commands, codes, texts, strict=False)
        found = [judge(case, line, code, text) for line, code, text in each]
        whole = len(codes) == len(outputs) and all(k in ("done", "refused") for k, _ in found)
        if whole and victim.read_bytes() == VICTIM and not victim.is_symlink():
            return case, found
        return tried(replace(case, together=False))
    found = []
    for line in case.entrance.commands:
        kind, problem = ended(case, line, work, place / "output")
        if victim.is_symlink() or victim.read_bytes() != VICTIM:
            kind, problem = "harm", "a file elsewhere was changed"
        label = f"{file}, {what}, mutant {case.number}, {' '.join(line.split()[:2])}"
        found.append((kind, f"{label}: {problem}"))
    return case, found


def all_ended(case: Case, work: Path, outputs: list[Path]) -> bytes:
    """Run all commands in one fork, each with an output: the exit codes, as far as it came."""
    out, into = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            limit(work)
            ConstrainedLayoutEngine.execute = lambda *given: None  # by drawing all twice
            files = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in outputs]
            harm = watched(work)
            for line, file in zip(case.entrance.commands, files, strict=True):
                os.dup2(file, 1)
                os.dup2(file, 2)
                code = obey(case, line)
                os.write(into, bytes([HARMED if harm else code]))
        os._exit(SHORT)
    os.close(into)
    waited_for(pid, case.patience)
    with open(out, "rb") as file:
        return file.read()


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seal(package: str, checkpoint: Path) -> None:
    """Make the manifest right, as whoever changed the files can; one that is none stays."""
    manifest = importlib.import_module(f"{package}.checkpoint.manifest")
    with contextlib.suppress(
        ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError
    ):
        if not (path := checkpoint / "manifest.json").is_file() or path.is_symlink():
            return
        content = json.loads(path.read_bytes())
        content.pop("digest", None)
        for name in content["files"]:
            if not (checkpoint / name).is_file():
                return
            stored = (checkpoint / name).read_bytes()
            entry = {"size": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}
            content["files"][name] = entry
        path.write_bytes(manifest.sealed(content))


def ended(case: Case, line: str, work: Path, output: Path) -> tuple[str, str]:
    """Run a command in a fork: how it ended, and what was wrong with that."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            _quiet(output)
            limit(work)
            harm = watched(work)
            code = obey(case, line)
            if harm:
                print(f"outside of its folder: {harm[:3]}", flush=True)
            os._exit(HARMED if harm else code)
        os._exit(SHORT)
    code = waited_for(pid, case.patience)
    text = output.read_text("utf-8", "backslashreplace") if output.exists() else ""
    return ("violation", "it hangs") if code is None else judge(case, line, code, text)


def waited_for(pid: int, patience: float) -> int | None:
    """How a process ended; None for one that had to be killed, since it hardly computed.

    One that computes ends by its limit, which takes a while on a busy machine.
    """
    descriptor, used, late = os.pidfd_open(pid), 0, False
    while not late and not select.select([descriptor], [], [], patience)[0]:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        before, used = used, int(fields[11]) + int(fields[12])
        late = used - before < 100  # hundredths of a second
    if late:
        os.kill(pid, signal.SIGKILL)
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if late else code


def judge(case: Case, line: str, code: int, text: str) -> tuple[str, str]:
    """What an exit code and a text are worth."""
    tail = " | ".join(text.strip().splitlines()[-3:])[-400:]
    # CPython itself may lose a MemoryError on its way up.
    lost = "returned NULL without setting an exception" in text
    if code == SHORT or lost or "bad_alloc" in text or "DefaultCPUAllocator" in text:
        return "out of memory", ""
    if code == -signal.SIGXCPU:
        # A config.json may ask for a model of any size, and for as much work.
        kind = "out of time" if case.entrance.name == "config.json" else "violation"
        return kind, f"over {SECONDS} s of computing"
    if code == HARMED:
        return "harm", tail
    if code < 0 or code == BROKEN or "Traceback" in text:
        return "violation", f"exit code {code}: {tail}"
    # What a model of bytes writes is whatever it has learnt.
    odd = [c for c in text if not c.isprintable() and c not in "\n\t\r"]
    if odd and not line.startswith("infer"):
        return "violation", f"it prints {odd[0]!a}: {tail!a}"
    errors = [one for one in text.splitlines() if one.startswith("error: ")]
    said = line.startswith(("verify", "workflow")) and code == 1
    if code == 0 or said:
        return "done", ""
    if len(errors) != 1 or len(errors[0]) > LONGEST:
        return "violation", f"exit code {code}, lines of error: {len(errors)}: {tail}"
    return "refused", ""


def limit(work: Path) -> None:
    """In a fork: be in a folder, with little memory and time."""
    os.chdir(work)
    tempfile.tempdir = str(work)
    os.environ.update(TMPDIR=str(work), TORCHINDUCTOR_CACHE_DIR=str(work / "inductor"))
    sys.dont_write_bytecode = True  # Python may, beside any module that it imports first here
    # No promise is about these here, and they take most of the time.
    gc.disable()
    gc.collect = os.fsync = lambda *given: 0
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY, MEMORY))


def obey(case: Case, line: str) -> int:
    """Run a command here: its exit code."""
    package = case.entrance.package
    main = importlib.import_module(f"{package}.__main__")
    stub_stages(package)
    parse = main.parse
    if line in PARSED:
        main.parse = lambda *given: copy.deepcopy(PARSED[line])
    if case.sabotage:
        case.sabotage(package)
    try:
        sys.argv = [package, *line.split()]
        code = main.main()
    except BaseException as error:
        code = SHORT if short_of_memory(error) else BROKEN
        traceback.print_exc()
    main.parse = parse
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def short_of_memory(error: BaseException | None) -> bool:
    """Whether memory was refused."""
    while error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


ON_PATHS = {"os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2}
ON_PATHS |= {"os.symlink": 2, "os.chmod": 1, "os.truncate": 1, "os.chown": 1, "os.utime": 1}
STARTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess",
    "pty",
    "socket.connect",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def watched(inside: Path) -> list[str]:
    """From now on notes what starts a process or writes outside of a folder."""
    harm: list[str] = []
    root = f"{os.path.realpath(inside)}/"

    def outside(event: str, path: Any, arguments: tuple[Any, ...]) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.fsdecode(path)
        if event != "os.truncate" and type(arguments[-1]) is int and arguments[-1] > 2:
            # Relative to an open folder, as in shutil.rmtree.
            name = os.path.join(os.readlink(f"/proc/self/fd/{arguments[-1]}"), name)
        folder, last = os.path.split(name)
        return not f"{os.path.realpath(folder)}/{last}/".startswith(root)

    def asks_for_the_commit(event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether git reads the version of the code (run/source_code.py), not that of a file."""
        if event != "subprocess.Popen":
            return False
        command = list(arguments[1])
        known = command[:2] == ["git", "-C"] and command[3:4] == ["--no-optional-locks"]
        return known and not f"{os.path.realpath(command[2])}/".startswith(root)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if asks_for_the_commit(event, arguments):
            pass
        elif event.startswith(STARTS):
            harm.append(f"{event} {arguments!a:.100}")
        elif event == "open" and sys._getframe(1).f_code.co_name == "open_to_write":
            pass  # what opens it comes next: os.open, if at all
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            folder, name = os.path.split(os.path.abspath(os.fsdecode(arguments[0])))
            real = os.path.join(os.path.realpath(folder), name)
            real = real if arguments[2] & os.O_NOFOLLOW else os.path.realpath(real)
            if arguments[2] & WRITING and not real.startswith(root) and real != os.devnull:
                harm.append(f"{event} {real!a:.200}")
        elif event in ON_PATHS:
            for path in arguments[event == "os.symlink" : ON_PATHS[event]]:
                if outside(event, path, arguments):
                    harm.append(f"{event} {path!a:.200}")

    sys.addaudithook(hook)
    return harm


def everywhere(package: str, name: str, value: Any) -> None:
    """Give a name another value in each module of a package that has it."""
    for module in [m for n, m in sys.modules.items() if n.startswith(f"{package}.")]:
        if hasattr(module, name):
            setattr(module, name, value)


def _trusts_json(package: str) -> None:
    everywhere(package, "read_json", lambda path: json.loads(path.read_bytes()))


def _waits_at_a_pipe(package: str) -> None:
    everywhere(package, "check_regular", lambda files: None)


def _follows_links(package: str) -> None:
    def plainly(path: Path, mode: str = "w", **options: Any) -> Any:
        return open(path, mode, **options)

    everywhere(package, "open_to_write", plainly)


BREAKS: dict[Callable[[str], None], tuple[str, tuple[int, ...]]] = {
    _trusts_json: ("config.json", (mutations.SPECIAL.index("zeros"),)),
    _waits_at_a_pipe: ("text", (mutations.SPECIAL.index("a pipe"),)),
    _follows_links: (".lock", (mutations.SPECIAL.index("a link elsewhere"),)),
}
"""What is broken; in which entrance it shows, and in which mutants."""


if __name__ == "__main__":
    run_topic("entrances", attempt)
