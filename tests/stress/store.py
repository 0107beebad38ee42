"""Checkpoints in an object store that fails, lies, does not answer, or has two writers.

The store is moto's S3 on loopback, in a process of its own (store_server.py); what stands before it
strikes each kind of request: refused, cut off, answered late, by half, not at all, or with an error
that is called a success. Runs are forked, on one process and on two ranks, with each way to save;
they are killed in the middle of an upload as well. All end with the bits of an undisturbed run.
"""

import dataclasses
import importlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import render

from . import store_mutants
from .common import Findings, run_topic
from .kill_storm import Part, side_by_side
from .store_cases import HANGS, LIES, PASSES, Variant, hang, kill, strike, two
from .store_server import Server
from .storm import import_all, plan_of

VARIANTS = ("single_dcp_async", "ddp_dcp_async", "fsdp_dcp", "single_torch_save")

# Words for the failures, for the page; others are HTTP statuses.
FAILURES = {
    "cut": "connection cut",
    "lost": "executed, but not answered",
    "short": "half of the answer",
    "late": "late answer",
    "hang": "no answer",
    "200": "200 with an error in the body",
}


def strikes(variant: Variant, found: Findings, hits: Counter[str]) -> None:
    """Each kind of failure at requests drawn at random, once, and from one on."""
    rng = random.Random(variant.plan.package)
    each = 1 if found.bounded else 6
    hows = ("lost",) if found.bounded else PASSES + LIES
    for how in hows:
        for first in rng.sample(range(variant.requests), each):
            hits[f"disturbed requests: {FAILURES.get(how, how)}"] += strike(variant, how, first)
    for how in () if found.bounded else ("500", "403", "cut"):
        for first in rng.sample(range(variant.requests), 3):
            hits["stores that failed permanently"] += strike(variant, how, first, 10**6)


def hanging(variant: Variant, found: Findings, hits: Counter[str]) -> None:
    """All of it, or one."""
    for moment in ("a read",) if found.bounded else HANGS:
        for stops in (True,) if found.bounded else (True, False):
            hang(variant, moment, stops)


def attempt(findings: Findings) -> None:
    """All variants; in part one, on one process."""
    names = list(VARIANTS)[: 1 if findings.bounded else None]
    sources = rendered(findings.folder / "renders", names)

    def part(name: str, *doing: Callable[..., None]) -> Part:
        def do(found: Findings, hits: Counter[str]) -> None:
            server = Server()
            plan = plan_of(name, sources[name])
            settings = plan.settings | {"optim.final_fraction": 1.0}  # half of it is a run, too
            plan = dataclasses.replace(plan, settings=settings, store="s3://bucket")
            variant = Variant(plan, found.folder / name, found, server)
            for action in doing:
                action(variant, found, hits)
            server.close()

        return do

    doing = (strikes, hanging, kill, two)
    if findings.bounded:
        parts = [part(names[0], *doing[:2], store_mutants.attempt)]
    else:
        parts = [*(part(name, *doing) for name in names), part(names[0], store_mutants.attempt)]
    hits = side_by_side(findings, parts)
    figures = (
        "disturbed requests",
        "stores that",
        "partial uploads",
        "runs that",
        "pairs of",
        "kills",
    )
    findings.figures.update({k: n for k, n in hits.items() if k.startswith(figures)})


def rendered(folder: Path, names: list[str]) -> dict[str, Path]:
    """A package for each variant, imported, with what it imports when it opens a store."""
    sources = {}
    for name in names:
        parallelism, _, checkpoint = name.partition("_")
        answers: dict[str, Any] = {"parallelism": parallelism, "checkpoint": checkpoint}
        answers |= {"storage": "object_store", "tracker": "none", "package_name": name}
        (folder / name).mkdir(parents=True)
        sources[name] = render(folder / name, **answers)
        sys.path.insert(0, str(sources[name]))
    import_all([*sources])
    importlib.import_module("s3fs")
    return sources


if __name__ == "__main__":
    run_topic("store", attempt)
