"""What the mutants of the topics share: how one is counted, and a breakage that two topics try."""

import importlib
from collections.abc import Callable
from typing import Any

from .common import Findings

NOTICED = "code that breaks one of these promises is detected"


def count_mutant(
    findings: Findings, sabotage: Callable[[str], None], noticed: bool, promise: str = NOTICED
) -> None:
    """Count a breakage in `findings`: it is a violation if nothing noticed it."""
    problem = None
    if not noticed:
        problem = f"nothing was noticed of {sabotage.__name__}"
    findings.tally(promise, "ways to break one").count(problem)


def publish_failed_saves(package: str, write_manifest: Callable[[Any], None]) -> None:
    """Let a package publish a save that failed; `write_manifest` gets the path of its manifest."""
    publisher = importlib.import_module(f"{package}.checkpoint.publish").Publisher
    manifest = importlib.import_module(f"{package}.checkpoint.manifest")
    publish = publisher.publish

    def hasty(self: Any, step: int, *rest: Any) -> Any:
        try:
            return publish(self, step, *rest)
        except manifest.CheckpointError:
            write_manifest(self.directory / manifest.step_name(step) / manifest.MANIFEST)
            raise

    publisher.publish = hasty
