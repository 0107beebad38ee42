"""What is scarce or breaks while a run saves: room on the disk, rights, the disk itself, time.

Each call that a save makes is refused once, and all from each call on, with the errors that a full
disk, a quota, a failing disk, a read-only file system and lost rights give (fault_injection.py),
or interrupted, or slow; and real file systems are filled, closed and broken (faulty_disks.py). Runs
are forked, on one rank and two, with each way to save. Each call of a start is refused as well (on
two ranks each third), and stops are disturbed; then one rank is slow, a save takes longer than its
interval, and the memory of a process is watched over a hundred saves, and over 6,000 steps with its
threads and descriptors.
"""

import errno
import itertools
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import render

from . import fault_injection, faulty_disks, resource_mutants
from .common import Findings, run_topic
from .fault_cases import (
    disturb,
    disturb_threads,
    fills_up,
    log_lines,
    long,
    memory,
    slow,
    start,
    stop,
)
from .faulty_saves import Fault, Variant
from .kill_storm import Part, side_by_side
from .prepare_checkpoints import ANSWERS
from .storm import import_all

# Words for the real file systems, for the page.
DISKS = {
    "FullDisk": "a full tmpfs",
    "NoNames": "a tmpfs without free inodes",
    "ReadOnly": "a file system that becomes read-only",
    "NoRights": "a folder without write permission",
    "ThinDisk": "ext4 on a device smaller than it claims",
}


def scarcity(variants: list[Variant], found: Findings, hits: Counter[str]) -> None:
    """Real file systems that fill up, close or fail."""
    reason = faulty_disks.own_mounts()
    for kind, points in faulty_disks.KINDS.items():
        try:
            if reason and kind is not faulty_disks.NoRights:
                raise OSError(reason)
            for variant in variants:
                trouble = kind(folder=variant.folder / kind.__name__)
                chosen = points[:: 4 if found.bounded else 1]
                run = variant.run(
                    dict(zip(variant.disturbed, chosen, strict=False)), trouble, trouble.place
                )
                hits[f"saves disturbed by {DISKS[kind.__name__]}"] += len(run.struck)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"NOT TRIED: {kind.__doc__} ({error})", file=sys.stderr, flush=True)
            hits[f"not tried: {kind.__name__}, {error}"] += 1
    for variant in () if reason else variants:
        for megabytes in (2, 3)[: 1 if found.bounded else None]:
            fills_up(variant, megabytes, hits)


def whole(variants: list[Variant], found: Findings, hits: Counter[str]) -> None:
    """All that is refused to some variants."""
    bounded = found.bounded
    for variant in variants:
        rank = max(0, variant.ranks - 1) if "dcp" in variant.package else 0
        some = [Fault(errno.EDQUOT), Fault(errno.EROFS), Fault(errno.EACCES, once=True)]
        full = not variant.ranks and not variant.package.endswith("async")
        most = 3 if bounded else None if full else 55
        disturb(variant, [Fault(errno.ENOSPC)], most, hits)
        disturb(variant, [Fault(errno.EIO, once=True, rank=rank)], most, hits)
        disturb(variant, [] if bounded else [*some, Fault(errno.EIO)], 11, hits)
        signals, delays = Fault(errno.EINTR, once=True), Fault(0, rank=rank, delay=0.02)
        longer = Fault(0, once=True, rank=rank, delay=1.0)
        if bounded:
            disturb(variant, [signals if variant.ranks else delays], 3, hits)
        else:
            disturb(variant, [signals], 44, hits)
            disturb(variant, [delays, longer], 11, hits)
        rng = random.Random(1)
        for trouble in (Fault(errno.ENOSPC), Fault(errno.EIO, once=True))[bounded:]:
            for _ in range(1 if bounded else 4):
                stop(variant, trouble, rng.randrange(variant.points(trouble)))
        base = variant.new()
        variant.job(base, lambda call: 0, set(), **{"train.steps": variant.steps - 2})
        for rank in range(max(1, variant.ranks)):
            points = itertools.count(0, 3 if variant.ranks else 1)
            for point in rng.sample(range(100), 2) if bounded else points:
                if not start(variant, base, rank, point, once=point % 2 == 0):
                    break
            few = () if variant.ranks else (3,)
            for point in few if bounded else itertools.count(0, 3):
                if not start(variant, base, rank, point, True, errno.EINTR):
                    break


def rest(variants: list[Variant], found: Findings, hits: Counter[str]) -> None:
    """What is not of refused saves."""
    plain, ranks = variants
    disturb_threads(plain, hits)
    for first, last in ((3, 6), (3, 1000)):
        log_lines(plain, first, last)
    slow(ranks, 0.1, hits)
    slow(plain, 6.0, hits)
    if not found.bounded:
        slow(ranks, 6.0, hits)
    memory(plain, 24 if found.bounded else 104, 192 if found.bounded else 512, hits)
    for variant in (plain,) if found.bounded else (plain, ranks):
        long(variant, 400 if found.bounded else 6_000, hits)


def attempt(findings: Findings) -> None:
    """All ways to save, on one plain process and on two ranks."""
    if reason := fault_injection.cannot():
        raise SystemExit(f"NOT TRIED: {reason}")
    findings.folder.chmod(0o755)  # some ranks are nobody
    names = rendered(findings.folder / "renders")
    plans = [(name, ranks) for name in names for ranks in (0, 2)]
    if findings.bounded:
        plans = [plans[0], plans[5]]

    def part(of: list[tuple[str, int]], *doing: Callable[..., None]) -> Part:
        def do(found: Findings, hits: Counter[str]) -> None:
            found.folder.chmod(0o755)
            steps = 8 if found.bounded or of in (last, broken) else 24
            variants = [Variant(*it, found.folder / f"{it[0]}-{it[1]}", found, steps) for it in of]
            for action in doing:
                action(variants, found, hits)

        return do

    last, broken = [(names[2], 0), (names[2], 2)], [(names[2], 0), (names[0], 0)]
    parts = [*(part([plan], whole) for plan in plans), part(last, rest)]
    parts += [part(plans[:1] if findings.bounded else plans[::2], scarcity)]
    parts += [part(broken, resource_mutants.attempt)]
    hits = side_by_side(findings, parts)
    del hits["most lost"]  # of a storm
    findings.figures.update(hits)


def rendered(folder: Path) -> list[str]:
    """A package for each way to save, imported."""
    names = []
    for answer in ANSWERS:
        names.append(f"resources_{answer}")
        (folder / answer).mkdir(parents=True)
        answers = {"checkpoint": answer, "parallelism": "ddp", "tracker": "none"}
        source = render(folder / answer, package_name=names[-1], **answers)
        sys.path.insert(0, str(source))
    import_all(names)
    return names


if __name__ == "__main__":
    run_topic("resources", attempt)
