"""Code that breaks a promise about stores, one way each: it has to be noticed."""

import contextlib
import importlib
import io
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import store_cases as cases
from .common import Findings
from .mutants import count_mutant, publish_failed_saves


def module(package: str, name: str) -> Any:
    """A module of the checkpoints."""
    return importlib.import_module(f"{package}.checkpoint.{name}")


def _tries_once(package: str) -> None:
    module(package, "object_store").RETRY_DELAYS = ()


def _has_no_owner(package: str) -> None:
    module(package, "storage").StorePublisher.check_owner = lambda self: None


def _leaves_half_uploads(package: str) -> None:
    module(package, "object_store").RemotePath.abort_multipart_uploads = lambda self: None


def _leaves_rubbish(package: str) -> None:
    module(package, "object_store").RemotePath.remove_tree = lambda self: None


def _publishes_what_failed(package: str) -> None:
    def write_manifest(path: Any) -> None:
        with contextlib.suppress(OSError):
            path.write(b'{"files": {}}')

    publish_failed_saves(package, write_manifest)


def _waits_for_ever(package: str) -> None:
    module(package, "object_store").time_left = lambda: math.inf


Try = Callable[[cases.Variant], object]


def strike(how: str, only: str) -> Try:
    """Let the first such request fail."""
    return lambda it: cases.strike(it, how, 0, 1, only)


BREAKS: dict[Callable[[str], None], tuple[str, Try]] = {
    _tries_once: (cases.PASSED, strike("500", "PUT .*manifest")),
    _leaves_half_uploads: (cases.DROPPED, lambda it: cases.kill(it, it.findings, Counter(), 1)),
    _has_no_owner: (cases.ONE, lambda it: cases.two(it, it.findings, Counter(), 3)),
    _leaves_rubbish: (cases.TIDY, strike("500", "PUT .*manifest")),
    _publishes_what_failed: (cases.THERE, strike("403", "PUT .*step_00000012")),
    _waits_for_ever: (cases.IN_TIME, lambda it: cases.hang(it, "a save", True)),
}
"""What is broken; which promise that is of, and how to notice."""


def attempt(variant: cases.Variant, findings: Findings, hits: Counter[str]) -> None:
    """Break each promise; `findings` counts those that were not noticed."""
    for sabotage, (promise, try_it) in list(BREAKS.items())[: 1 if findings.bounded else None]:
        own = variant.findings = Findings(findings.bounded, findings.folder)
        variant.sabotage = sabotage
        with contextlib.redirect_stderr(io.StringIO()):
            try_it(variant)
        count_mutant(findings, sabotage, own.violated(promise))
