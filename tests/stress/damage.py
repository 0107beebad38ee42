"""Damage to what is published: is all of it found and named, and is the one before used?

Three checkpoints of each answer, saved by one rank and by two, are damaged one way at a time:
single bits, lengths, names, kinds of file, and what belongs to another step. Then the project's own
functions look at them: `verify` for each, and for a sample of them a run that has to go on.
"""

import contextlib
import importlib
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import render

from . import own_code
from .common import Findings, run_topic
from .prepare_checkpoints import ANSWERS, save, settings

FOUND = "damage is detected and named"
RESUMED = "if the newest checkpoint is damaged, the previous one is restored bit for bit"
NO_FRESH_START = (
    "if all checkpoints are damaged, the run stops with an error and overwrites nothing"
)
BASE = "a resume refuses frozen weights that differ from those that the run was trained with"
NO_FALSE_ALARM = "undamaged checkpoints pass verification, and so do repaired ones"
TEXT = "Was ever woman in this humour wooed? " * 300
Damage = Callable[[], None]


class Target:
    """Three checkpoints of a run, the newest of which is damaged and put right again."""

    def __init__(self, package: str, run: Path, ranks: int) -> None:
        self.package, self.run, self.ranks = package, run, ranks
        self.manifest = importlib.import_module(f"{package}.checkpoint.manifest")
        self.publish = importlib.import_module(f"{package}.checkpoint.publish")
        self.before, self.newest = self.publish.published(run / "checkpoints")[-2:]
        self.files = sorted(path.name for path in self.newest.iterdir())
        self.entries = self.manifest.read_manifest(self.newest)["files"]

    def __str__(self) -> str:
        return f"{self.package}, {self.ranks} ranks"

    def problems(self, path: Path | None = None) -> list[str]:
        """What the project finds wrong with the newest checkpoint."""
        return self.manifest.verify(path or self.newest)[1]

    def problems_of(self, name: str) -> list[str]:
        """What it finds wrong with one file, the others left unread (to try many bits)."""
        if name != self.manifest.MANIFEST:
            problem = self.manifest.check_file(self.newest / name, self.entries[name])
            return [problem] if problem else []
        try:
            self.manifest.read_manifest(self.newest)
        except self.manifest.CheckpointError as error:
            return [str(error)]
        return []


def attempt(findings: Findings) -> None:
    """Save, then damage in every way."""
    probe(findings, saved(findings.folder))
    damage_base(findings)


def probe(findings: Findings, targets: list[Target]) -> None:
    """Damage each in every way, and put it right again."""
    rng = random.Random(5)
    logging.disable(logging.WARNING)  # thousands of warnings, each as it should be
    try:
        for target in targets:
            alarm(findings, target)
            flip(findings, target, rng)
            for what, named, damage in damages(target, rng, findings.bounded):
                seen(findings, target, what, named, damage)
            alarm(findings, target)
        for target in targets[:: 3 if findings.bounded else 1]:
            resume(findings, target, rng)
    finally:
        logging.disable(logging.NOTSET)


def damage_base(findings: Findings) -> None:
    """Flip bits of the file that has the frozen weights of a run: no resume takes other ones."""
    package = f"damage_{ANSWERS[0]}"
    training = importlib.import_module(f"{package}.train")
    errors = importlib.import_module(f"{package}.errors")
    folder = findings.folder / "with_base"
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    base = folder / "base.safetensors"

    def start(steps: int) -> None:
        left_out = {"init_from": base, "checkpoint.frozen": "no"}
        training.run(settings(package, folder / "run", folder / "text.txt", steps, **left_out))

    build_model = training.build_model
    own_code.freeze(package)
    try:
        config = settings(package, folder / "run", folder / "text.txt")
        own_code.write_base(package, config, base)
        start(2)
        bits = base.stat().st_size * 8
        rng = random.Random(6)
        for bit in rng.sample(range(bits), 10 if findings.bounded else 40):
            content = bytearray(base.read_bytes())
            content[bit // 8] ^= 1 << bit % 8
            base.write_bytes(content)
            problem = f"bit {bit} of the base: a run went on"
            try:
                start(3)
            except (errors.UserError, errors.RankError) as error:
                if str(base) in str(error):
                    problem = ""
            content[bit // 8] ^= 1 << bit % 8
            base.write_bytes(content)
            findings.tally(BASE, "bits").count(problem or None)
        start(3)
    finally:
        training.build_model = build_model


def saved(folder: Path) -> list[Target]:
    """Render every answer, and save with one rank here and with two under torchrun."""
    packages, paths = [], []
    for answer in ANSWERS:
        place = folder / answer
        place.mkdir()
        name = f"damage_{answer}"
        paths.append(render(place, package_name=name, checkpoint=answer, parallelism="ddp"))
        packages.append(name)
    sys.path[:0] = map(str, paths)
    one, two = folder / "1", folder / "2"
    for runs in (one, two):
        runs.mkdir()
        (runs / "text.txt").write_text(TEXT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*launch, str(Path(__file__).with_name("prepare_checkpoints.py")), str(two), *packages],
        env={**os.environ, **variables},
    ) as process:
        save(one, packages)
        if process.wait(timeout=1500):
            raise SystemExit("two ranks could not save")
    return [
        Target(package, runs / package, ranks)
        for ranks, runs in ((1, one), (2, two))
        for package in packages
    ]


def alarm(findings: Findings, target: Target) -> None:
    """Nothing must be wrong with what is whole."""
    for path in target.publish.published(target.run / "checkpoints"):
        problems = target.problems(path)
        tally = findings.tally(NO_FALSE_ALARM, "checkpoints")
        tally.count(f"{target}: {path.name}: {problems}" if problems else None)


def flip(findings: Findings, target: Target, rng: random.Random) -> None:
    """Flip single bits of every file: at random places, and, in full, all of the smaller files."""
    tally = findings.tally(FOUND + ": a flipped bit", "bits")
    for name in target.files:
        path = target.newest / name
        bits = path.stat().st_size * 8
        every = not findings.bounded and target.ranks == 2 and bits <= 200_000
        chosen = range(bits) if every else rng.sample(range(bits), 40 if findings.bounded else 2000)
        with open(path, "r+b", buffering=0) as file:
            for number, bit in enumerate(chosen):
                (good,) = os.pread(file.fileno(), 1, bit // 8)
                os.pwrite(file.fileno(), bytes([good ^ 1 << bit % 8]), bit // 8)
                # Some of them by the way that a restart goes, which reads all files.
                problems = target.problems() if number % 100 == 0 else target.problems_of(name)
                os.pwrite(file.fileno(), bytes([good]), bit // 8)
                named = any(name in problem for problem in problems)
                tally.count(None if named else f"{target}: bit {bit} of {name}: {problems}")


def damages(target: Target, rng: random.Random, bounded: bool) -> Iterator[tuple[str, str, Damage]]:
    """What else is done, each with the file that has to be named; undone by copying back."""
    newest, before, manifest = target.newest, target.before, target.manifest.MANIFEST
    for name in target.files:
        path = newest / name
        size = path.stat().st_size
        lengths = {0, 1, size - 1, *(rng.randrange(size) for _ in range(5 if bounded else 100))}
        for length in sorted(lengths):
            yield f"cut to {length} bytes", name, lambda p=path, n=length: os.truncate(p, n)
        for more in (b"\0", b"\n", b" ", b"}", rng.randbytes(5000)):
            yield f"{more[:1]!r} appended", name, lambda p=path, m=more: append(p, m)
        yield "deleted", name, path.unlink
        yield "a directory", name, lambda p=path: (p.unlink(), p.mkdir())
        yield "a pipe", name, lambda p=path: (p.unlink(), os.mkfifo(p))
        yield "a socket", name, lambda p=path: (p.unlink(), bind(p))
        yield "a link to /dev/zero", name, lambda p=path: link(p, "/dev/zero")
        yield "a link to itself", name, lambda p=path: link(p, p.name)
        yield "a link to nothing", name, lambda p=path: link(p, "nothing")
        if os.geteuid() == 0:
            yield "a device", name, lambda p=path: device(p)
        if (before / name).read_bytes() != path.read_bytes():
            yield "of another step", name, lambda p=path, b=before: shutil.copy(b / p.name, p)
            yield (
                "a link to another step's file",
                name,
                lambda p=path, b=before: link(p, f"../{b.name}/{p.name}"),
            )
        hole = rng.randrange(max(1, size - 4096))
        yield "4 KiB of zeros in it", name, lambda p=path, h=hole: overwrite(p, h, bytes(4096))
        for other in target.files[: target.files.index(name)]:
            worse = manifest if manifest in (name, other) else name  # then the rest is not read
            yield f"swapped with {other}", worse, lambda a=path, b=newest / other: swap(a, b)
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "the step": lambda m: m.update(step=m["step"] + 1),
        "the format": lambda m: m.update(format_version=99),
        "a hash": lambda m: next(iter(m["files"].values())).update(sha256="0" * 64),
        "a size": lambda m: next(iter(m["files"].values())).update(size=1),
        "no files": lambda m: m.update(files={}),
        "one more file": lambda m: m["files"].update(extra={"size": 0, "sha256": "0" * 64}),
        "a file that is not there": lambda m: m["files"].update({"../x": {}}),
    }
    for what, edit in edits.items():
        # What is edited and sealed again is found where it disagrees with the directory.
        yield f"{what} edited, sealed again", "", lambda e=edit: reseal(target, e)
    yield "edited, not sealed again", manifest, lambda: overwrite(newest / manifest, 1, b"\n")
    yield "empty", manifest, lambda: [path.unlink() for path in newest.iterdir()]
    yield "a file in place of it", manifest, lambda: (shutil.rmtree(newest), newest.touch())
    yield "a link in place of it", "", lambda: (shutil.rmtree(newest), newest.symlink_to(before))
    yield (
        "another step renamed to it",
        manifest,
        lambda: (shutil.rmtree(newest), shutil.copytree(before, newest)),
    )


def seen(findings: Findings, target: Target, what: str, named: str, damage: Damage) -> None:
    """Do the damage, see what is found, undo it."""
    with undone(target.newest):
        damage()
        problems = target.problems()
    missed = not problems or not any(named in problem for problem in problems)
    tally = findings.tally(FOUND, "other damages")
    tally.count(f"{target}: {named} {what}: {problems}" if missed else None)


def resume(findings: Findings, target: Target, rng: random.Random) -> None:
    """Let a run go on over damage; then over nothing but damage."""
    training = importlib.import_module(f"{target.package}.train")
    errors = importlib.import_module(f"{target.package}.errors").RankError
    wanted, step = tensors(target, target.before), int(target.before.name[5:])
    for _ in range(2 if findings.bounded else 12):
        copy = findings.folder / "resumed"
        shutil.copytree(target.run, copy)
        copied = Target(target.package, copy, target.ranks)
        what, named, damage = rng.choice(list(damages(copied, rng, bounded=True)))
        damage()
        config = settings(target.package, copy, target.run.parent / "text.txt", steps=step)
        state = training.setup(config)
        group = training.Group(state.world)
        with training.RunDirectory(copy, group) as run_dir:
            found = {}
            with contextlib.suppress(errors):  # of damage that was not found, but met
                checkpointer = training.resume(state, run_dir.path, group)
                found = dict(flat(target, checkpointer.tensors()))
                checkpointer.close()
        aside = [path.name for path in copy.glob("checkpoints/*.damaged-1")]
        same = found.keys() == wanted.keys()
        same = same and all(found[name].equal(tensor) for name, tensor in wanted.items())
        well = state.step == step and aside == [f"{target.newest.name}.damaged-1"] and same
        problem = f"{target}: {named} {what}: step {state.step}, set aside {aside}, same {same}"
        findings.tally(RESUMED, "resumes").count(None if well else problem)

        for path in target.publish.published(copy / "checkpoints"):
            shutil.rmtree(path)
            path.mkdir()
        problem = f"{target}: all damaged: a run began"
        with contextlib.suppress(errors):
            training.run(config)
            problem += " and ended"
        kept = "ended" not in problem and len(list(copy.glob("checkpoints/*.damaged-1"))) == 3
        findings.tally(NO_FRESH_START, "runs").count(None if kept else problem)
        shutil.rmtree(copy)


def tensors(target: Target, path: Path) -> dict[str, Any]:
    """All that a checkpoint holds."""
    import torch

    reading = importlib.import_module(f"{target.package}.checkpoint.transfer")
    control = importlib.import_module(f"{target.package}.distributed")
    source = reading.open_tensors(*reading.find_checkpoint(path))
    found = {name: torch.empty(f.shape, dtype=f.dtype) for name, f in source.forms.items()}
    source.read(found, control.Group())
    return found


def flat(target: Target, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Live tensors, by the names that they have in a checkpoint."""
    return importlib.import_module(f"{target.package}.checkpoint.tensors").flat(tree)


@contextlib.contextmanager
def undone(folder: Path) -> Iterator[None]:
    """Put a checkpoint back as it was."""
    kept = folder.with_name(".kept")
    shutil.copytree(folder, kept)
    try:
        yield
    finally:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        os.rename(kept, folder)


def append(path: Path, content: bytes) -> None:
    """Write something behind the end."""
    with open(path, "ab") as file:
        file.write(content)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Write something in the middle; of zeros in place of zeros, the byte after is flipped."""
    good = path.read_bytes()
    bad = good[:offset] + content + good[offset + len(content) :]
    if bad[: len(good)] == good:
        bad = good[:offset] + bytes([good[offset] ^ 255]) + good[offset + 1 :]
    path.write_bytes(bad[: len(good)])


def swap(left: Path, right: Path) -> None:
    """Exchange two files."""
    aside = left.with_name("aside")
    os.rename(left, aside)
    os.rename(right, left)
    os.rename(aside, right)


def link(path: Path, to: str) -> None:
    """Put a link in place of a file."""
    path.unlink()
    path.symlink_to(to)


def bind(path: Path) -> None:
    """Put a socket in place of a file."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)  # a whole path may be too long for it


def device(path: Path) -> None:
    """Put /dev/zero itself in place of a file; where that is forbidden, nothing is."""
    path.unlink()
    with contextlib.suppress(OSError):
        os.mknod(path, 0o20644, os.makedev(1, 5))


def reseal(target: Target, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest as somebody would who knows how it is made."""
    path = target.newest / target.manifest.MANIFEST
    content = json.loads(path.read_text("utf-8"))
    del content["digest"]
    edit(content)
    path.write_bytes(target.manifest.sealed(content))


if __name__ == "__main__":
    run_topic("damage", attempt)
