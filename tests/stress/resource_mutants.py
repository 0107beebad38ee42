"""Code that breaks a promise about scarce resources, one way each: it has to be noticed."""

import contextlib
import errno
import importlib
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import fault_cases
from .common import Findings
from .faulty_saves import GOES_ON, SAID, TIDY, WHOLE, Fault, Variant

NOTICED = "code that breaks one of these promises is found out"
KEPT: list[Any] = []


def module(package: str, name: str) -> Any:
    """A module of the engine."""
    return importlib.import_module(f"{package}.{name}")


def _hides_errors(package: str) -> None:
    module(package, "checkpoint.writing").naming = lambda path: contextlib.nullcontext()


def _loses_threads(package: str) -> None:
    writing = module(package, "checkpoint.writing")

    def forgetful(self: Any, *rest: Any) -> Any:
        self.fs = writing.Streams()
        written = writing.dcp.FileSystemWriter.write_data(self, *rest)
        self.names = [name for name in self.fs.names if (self.path / name).exists()]
        return written

    writing.ShardWriter.write_data = forgetful


def _leaves_rubbish(package: str) -> None:
    module(package, "checkpoint.disk").shutil.rmtree = lambda *_, **__: None


def _publishes_what_failed(package: str) -> None:
    snapshots, manifest = (
        module(package, "checkpoint.publish"),
        module(package, "checkpoint.manifest"),
    )
    publish = snapshots.Snapshots.publish

    def hasty(self: Any, step: int, *rest: Any) -> Any:
        try:
            return publish(self, step, *rest)
        except manifest.CheckpointError:
            target = self.directory / manifest.step_name(step)
            target.mkdir(exist_ok=True)
            (target / manifest.MANIFEST).write_text('{"files": {}}')
            raise

    snapshots.Snapshots.publish = hasty


def _leaks_descriptors(package: str) -> None:
    storage = module(package, "checkpoint.disk")
    sha256_of = storage.sha256_of
    storage.sha256_of = lambda path: (KEPT.append(path.open()), sha256_of(path))[1]


def _never_stops(package: str) -> None:
    recovery = module(package, "checkpoint.checkpointer").Recovery
    settle = recovery._attempt

    def patient(self: Any, *rest: Any) -> None:
        with contextlib.suppress(RuntimeError):
            settle(self, *rest)

    recovery._attempt = patient


def _takes_errors_for_damage(package: str) -> None:
    manifest = module(package, "checkpoint.manifest")
    manifest.UnreadableError = manifest.CheckpointError


def _stops_for_a_line(package: str) -> None:
    metrics = module(package, "run.journal")

    def write(self: Any, record: dict[str, Any]) -> None:
        self.file.write(f"{record['step']}\n")
        self.file.flush()

    metrics.Journal._write = write


def _skips_saves(package: str) -> None:
    checkpointer = importlib.import_module(f"{package}.checkpoint.writer").Checkpointer
    save = checkpointer.save

    def skip(self: Any, *rest: Any) -> None:
        if not self.upload or self.upload.done():
            save(self, *rest)

    checkpointer.save = skip


def _says_nothing(package: str) -> None:
    module(package, "checkpoint.checkpointer").LONG = 1e9


def _leaks_copies(package: str) -> None:
    stager = module(package, "checkpoint.staging").Stager
    begin = stager.begin

    def leaky(self: Any, *rest: Any) -> Any:
        KEPT.append(self.buffers)
        self.buffers = {}
        return begin(self, *rest)

    stager.begin = leaky


FULL, ONCE = Fault(errno.ENOSPC), Fault(errno.EIO, once=True)
Try = Callable[[Variant], object]


def saves(trouble: Fault) -> Try:
    """Disturb a save."""
    return lambda variant: variant.run({2: 20}, trouble)


def starts(variant: Variant) -> None:
    """Refuse a read after the other, until it is noticed."""
    base = variant.new()
    variant.job(base, lambda call: 0, set(), **{"train.steps": 3})
    for point in range(6, 60, 6):
        fault_cases.start(variant, base, 0, point, True)
        if any(tally.violations for tally in variant.findings.tallies):
            return


BREAKS: dict[Callable[[str], None], tuple[str, Try]] = {
    _hides_errors: (SAID, saves(ONCE)),
    _loses_threads: (WHOLE, lambda it: fault_cases.disturb_threads(it, Counter())),
    _leaves_rubbish: (TIDY, saves(FULL)),
    _publishes_what_failed: (WHOLE, saves(ONCE)),
    _leaks_descriptors: (GOES_ON, saves(FULL)),
    _never_stops: (fault_cases.STOPS, lambda it: fault_cases.stop(it, FULL, 20)),
    _takes_errors_for_damage: (fault_cases.STARTS, starts),
    _stops_for_a_line: (fault_cases.LOGS, lambda it: fault_cases.log_lines(it, 3, 6)),
    _skips_saves: (fault_cases.SLOW, lambda it: fault_cases.slow(it, 3.0, Counter())),
    _says_nothing: (fault_cases.SAID_SLOW, lambda it: fault_cases.slow(it, 3.0, Counter())),
    _leaks_copies: (fault_cases.FLAT, lambda it: fault_cases.memory(it, 24, 128, Counter())),
}
"""What is broken; which promise that is of, and how to notice."""


def attempt(variants: list[Variant], findings: Findings, hits: Counter[str]) -> None:
    """Break each promise; `findings` counts those that were not noticed.

    Of the variants the second saves by torch.save, which needs its errors to be found.
    """
    for sabotage, (promise, try_it) in list(BREAKS.items())[:: 2 if findings.bounded else 1]:
        variant = variants[sabotage is _hides_errors]
        own = variant.findings = Findings(findings.bounded, findings.folder)
        variant.sabotage = sabotage
        with contextlib.redirect_stderr(io.StringIO()):
            try_it(variant)
        noticed = any(it.violations for it in own.tallies if it.promise == promise)
        problem = None if noticed else f"nothing was noticed of {sabotage.__name__}"
        findings.tally(NOTICED, "ways to break one").count(problem)
