"""Whether what a crash has left restores as it should, tried with the code of a render."""

import importlib
import logging
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .replay import Tree
from .saving import RUN

RESTORED = (
    "the newest complete checkpoint is restored bit for bit, never one older than the last "
    "finished save"
)
NAMED = "a folder with the name of a checkpoint is complete"
LEFT = "the next save leaves no unfinished files behind"
PROMISES = (RESTORED, NAMED, LEFT)
CHECKPOINTS = f"{RUN}/checkpoints"
NAME = re.compile(rf"{CHECKPOINTS}/(step_\d+)(?=/|$)")
EVERY = 10
"""Of equal bytes, the tensors are read each so many times; and so many states share one whose files
are verified by threads. To start a thread takes as long as all the rest.
"""
Contents = dict[str, bytes | None]


class InTurn:
    """Stands for a pool of threads that does one thing after the other."""

    def __init__(self, threads: int) -> None:
        """Nothing is made."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Do it now."""
        future: Future[Any] = Future()
        future.set_result(call(*arguments))
        return future

    def __enter__(self) -> "InTurn":
        """Nothing is started."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is waited for."""


class Restorer:
    """Restores from what crashes leave, with the code of a render."""

    def __init__(self, package: str, folder: Path, expected: Path) -> None:
        self.package, self.folder, self.expected = package, folder, expected
        self.restored: Counter[tuple[str, int]] = Counter()
        self.tried = 0
        torch.set_num_threads(1)  # a process with threads cannot be forked
        logging.getLogger(package).setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore")

    def module(self, name: str) -> Any:
        """A module of the render."""
        return importlib.import_module(f"{self.package}.{name}")

    def problems(
        self, run: str, tree: Tree, contents: Mapping[str, Contents], saved: int
    ) -> dict[str, str]:
        """What is wrong after a crash of a run that leaves `tree`, by promise.

        `contents` are of the checkpoints as they were published; `saved` is the last step whose
        save was over.
        """
        there = checkpoints(tree)
        whole = [name for name, content in there.items() if contents.get(name) == content]
        wanted = max((int(name[5:]) for name in whole), default=0)
        halves = ", ".join(sorted(there.keys() - whole))
        manifests, publish = self.module("checkpoint.manifest"), self.module("checkpoint.publish")
        directory = self.folder / CHECKPOINTS
        group, retention = (
            self.module("distributed").Group(),
            publish.RetentionConfig(keep=1),
        )
        ours = publish.Publisher(directory, retention, group)
        manifests.ThreadPoolExecutor = InTurn if self.tried % EVERY else ThreadPoolExecutor
        self.tried += 1
        restored = left = None
        write_tree(self.folder, tree)
        try:
            found = ours.newest_good()
            step = found[1]["step"] if found else 0
            if step != wanted:
                restored = f"step {step} was restored, not {wanted}"
            elif step < saved:
                restored = f"the save of step {saved} was over, and step {step} came back"
            elif found:
                restored = self._differences(run, contents[found[0].name], *found)

            def write(reservation: Path) -> list[str]:
                (reservation / "next").write_bytes(b"something")
                return ["next"]

            ours.publish(step + 1, write, {})
            names = sorted(os.listdir(directory))
            if half_done := [n for n in names if not manifests.PUBLISHED.fullmatch(n)]:
                left = f"left after the next save: {', '.join(half_done)}"
            if ours.newest_good()[1]["step"] != step + 1:
                left = f"of {', '.join(names)} the newest is not the last that was saved"
        except Exception as error:  # whatever it is, nobody wants it on the morning after
            restored = f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(self.folder)
        half = f"{halves} is not what was saved" if halves else None
        return {
            promise: problem
            for promise, problem in zip(PROMISES, (restored, half, left), strict=True)
            if problem
        }

    def _differences(
        self, run: str, contents: Contents, path: Path, manifest: dict[str, Any]
    ) -> str | None:
        if {f"/{name}": (path / name).read_bytes() for name in os.listdir(path)} != contents:
            return f"{path.name} is not what was saved"
        step = manifest["step"]
        self.restored[run, step] += 1
        if self.restored[run, step] % EVERY != 1:
            return None  # the same bytes have been read before
        reading, group = (
            self.module("checkpoint.reader"),
            self.module("distributed").Group(),
        )
        source = reading.open_tensors(path, manifest)
        found = {name: torch.empty(f.shape, dtype=f.dtype) for name, f in source.forms.items()}
        source.read(found, group)
        wanted = torch.load(self.expected / run / f"{step}.pt")
        names = found.keys() ^ wanted.keys()
        names |= {n for n in found.keys() & wanted.keys() if not torch.equal(found[n], wanted[n])}
        return (
            f"step {step} has other tensors than were saved: {sorted(names)[:3]}" if names else None
        )


def checkpoints(tree: Tree) -> dict[str, Contents]:
    """What bears the name of a checkpoint in a tree, and what is in it."""
    found: dict[str, Contents] = {}
    for path, content in tree:
        if match := NAME.match(path):
            if path == match[0]:
                found[match[1]] = {}
            elif path[match.end()] == "/":
                found[match[1]][path[match.end() :]] = content
    return found


def write_tree(root: Path, tree: Tree) -> None:
    """Make a directory."""
    root.mkdir(parents=True)
    for path, content in tree:
        if content is None:
            os.mkdir(root / path)
        else:
            (root / path).write_bytes(content)


def read_tree(root: Path) -> Tree:
    """A directory as it is, as far as it is recorded."""
    paths = [Path(RUN).parent, Path(RUN)]
    paths += [path.relative_to(root) for path in (root / CHECKPOINTS).rglob("*")]
    contents = {path: (root / path).read_bytes() for path in paths if (root / path).is_file()}
    return tuple(sorted((str(path), contents.get(path)) for path in [*paths, Path(CHECKPOINTS)]))
