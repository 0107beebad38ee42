"""Code that breaks a promise about scarce resources, one way each: it has to be noticed."""

import contextlib
import ctypes
import errno
import importlib
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import fault_cases
from .common import Findings
from .faulty_saves import COSTLESS, GOES_ON, SAID, TIDY, WHOLE, Fault, Variant
from .mutants import count_mutant, publish_failed_saves

KEPT: list[Any] = []


def module(package: str, name: str) -> Any:
    """A module of the engine."""
    return importlib.import_module(f"{package}.{name}")


def _hides_errors(package: str) -> None:
    module(package, "checkpoint.dcp").naming = lambda path: contextlib.nullcontext()


def _loses_threads(package: str) -> None:
    writer = module(package, "checkpoint.dcp").DcpWriter
    writer.errors = property(lambda self: [], lambda self, errors: None)


def _leaves_rubbish(package: str) -> None:
    module(package, "checkpoint.publish").shutil.rmtree = lambda *_, **__: None


def _publishes_what_failed(package: str) -> None:
    def write_manifest(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"files": {}}')

    publish_failed_saves(package, write_manifest)


def _leaks_descriptors(package: str) -> None:
    publisher = module(package, "checkpoint.publish").Publisher
    make_durable = publisher.make_durable

    def leaky(self: Any, reserved: str, names: Any) -> Any:
        entries = make_durable(self, reserved, names)
        KEPT.extend((self.directory / reserved / name).open() for name in entries)
        return entries

    publisher.make_durable = leaky


def _never_stops(package: str) -> None:
    checkpointer = module(package, "checkpoint.checkpointer").Checkpointer
    blocking = checkpointer._blocking

    @contextlib.contextmanager
    def patient(self: Any) -> Iterator[None]:
        with contextlib.suppress(RuntimeError), blocking(self):
            yield

    checkpointer._blocking = patient


def _takes_errors_for_damage(package: str) -> None:
    manifest = module(package, "checkpoint.manifest")
    manifest.RankError = manifest.CheckpointError


def _stops_for_a_line(package: str) -> None:
    metrics = module(package, "run.journal")

    def write(self: Any, record: dict[str, Any]) -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{record['step']}\n".encode())

    metrics.Journal._write = write


def _skips_saves(package: str) -> None:
    checkpointer = module(package, "checkpoint.checkpointer").Checkpointer
    save = checkpointer.save

    def skip(self: Any, *rest: Any) -> None:
        writing = self.writer.writing
        if not writing or writing.done():
            save(self, *rest)

    checkpointer.save = skip


def _says_nothing(package: str) -> None:
    module(package, "checkpoint.writer").LONG_WAIT = 1e9


def _leaks_copies(package: str) -> None:
    writer = module(package, "checkpoint.writer").Writer
    begin = writer.begin

    def leaky(self: Any, *rest: Any) -> Any:
        KEPT.append(self.buffers.buffers)
        self.buffers.buffers = {}
        return begin(self, *rest)

    writer.begin = leaky


def _leaks_each_step(package: str) -> None:
    training = module(package, "train")
    step = training.train_step
    training.train_step = lambda *rest: (KEPT.append(b"x" * 100_000), step(*rest))[1]


def _leaks_threads(package: str) -> None:
    publisher = module(package, "checkpoint.publish").Publisher
    make_durable = publisher.make_durable

    def leaky(self: Any, reserved: str, names: Any) -> Any:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return make_durable(self, reserved, names)

    publisher.make_durable = leaky


def _ends_at_a_signal(package: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def fsync(file: Any) -> None:
        if libc.fsync(file if isinstance(file, int) else file.fileno()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    os.fsync = fsync


def _is_impatient(package: str) -> None:
    publisher, error = (
        module(package, "checkpoint.publish").Publisher,
        module(package, "checkpoint.manifest").CheckpointError,
    )
    make_durable = publisher.make_durable

    def impatient(self: Any, reserved: str, names: Any) -> Any:
        began, entries = time.monotonic(), make_durable(self, reserved, names)
        if time.monotonic() - began > 0.5:
            raise error("this takes too long")
        return entries

    publisher.make_durable = impatient


FULL, ONCE = Fault(errno.ENOSPC), Fault(errno.EIO, once=True)
SIGNAL, DELAY = Fault(errno.EINTR, once=True), Fault(0, delay=0.6)
Try = Callable[[Variant], object]


def saves(trouble: Fault) -> Try:
    """Disturb a save."""
    return lambda variant: variant.run({2: 20}, trouble)


def starts(variant: Variant) -> None:
    """Refuse two reads after the other, until it is noticed: a manifest is read twice."""
    base = variant.new()
    variant.job(base, lambda call: 0, set(), **{"train.steps": 3})
    for point in range(6, 150, 2):
        fault_cases.start(variant, base, 0, point, once=True, calls=2)
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
    _skips_saves: (fault_cases.SLOW, lambda it: fault_cases.slow(it, 12.0, Counter())),
    _says_nothing: (fault_cases.SAID_SLOW, lambda it: fault_cases.slow(it, 12.0, Counter())),
    _leaks_copies: (fault_cases.FLAT, lambda it: fault_cases.memory(it, 24, 128, Counter())),
    _ends_at_a_signal: (COSTLESS, lambda it: fault_cases.disturb(it, [SIGNAL], 44, Counter())),
    _leaks_each_step: (fault_cases.LEVEL, lambda it: fault_cases.long(it, 400, Counter())),
    _is_impatient: (COSTLESS, lambda it: fault_cases.disturb(it, [DELAY], 9, Counter())),
    _leaks_threads: (fault_cases.LEVEL, lambda it: fault_cases.long(it, 400, Counter())),
}
"""What is broken; which promise that is of, and how to notice."""


def attempt(variants: list[Variant], findings: Findings, hits: Counter[str]) -> None:
    """Break each promise; `findings` counts those that were not noticed, in three tries each.

    Not each try strikes where the code is broken. Of the variants the second saves by torch.save,
    which needs its errors to be found.
    """
    for sabotage, (promise, try_it) in list(BREAKS.items())[:: 4 if findings.bounded else 1]:
        variant, noticed = variants[sabotage is _hides_errors], False
        variant.sabotage = sabotage
        for _ in range(3):
            own = variant.findings = Findings(findings.bounded, findings.folder)
            with contextlib.redirect_stderr(io.StringIO()):
                try_it(variant)
            noticed = own.violated(promise)
            if noticed:
                break
        count_mutant(findings, sabotage, noticed)
