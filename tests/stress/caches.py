"""Compile caches as somebody would craft them, and the way that a run takes one over.

All but one hold a pickle that executes something when torch compiles, and differ from a cache of
this run in one point. The one that does not differ is this run's own: it is loaded, and so would
the pickle be. Whoever can write as this user, into this run, needs no cache to run code.
"""

import contextlib
import importlib
import json
import os
import pickle
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

KEY, NAME, OWN = "hostile", "cpu_0", "its own"
DEVICE = torch.device("cpu")
Change = Callable[[Path], object]


def artifacts(content: bytes) -> bytes:
    """What torch saves, with this as a pickle that it reads when it compiles."""
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        importlib.import_module("torch._dynamo.pgo")  # which makes its kind known
        CacheArtifactManager.record_artifact("pgo", KEY, content)
        found = torch.compiler.save_cache_artifacts()
    assert found
    return found[0]


def read_by(package: str, directory: Path, world: Any) -> tuple[bool, str]:
    """Whether a run takes the cache over, and what it warns of; then torch reads what it has."""
    from torch._dynamo import pgo

    cache = importlib.import_module(f"{package}.compile_cache")
    config = importlib.import_module(f"{package}.compile").CompileConfig(mode="full")
    warned: list[str] = []
    cache.log = SimpleNamespace(
        info=lambda *text: None,
        log=lambda level, text, *of: warned.append(text % of),
        warning=lambda text, *of: warned.append(text % of),
    )
    carried = cache.CompileCache(directory, config, world)
    carried.__enter__()
    with contextlib.suppress(AssertionError):  # what it has unpickled is not what it wants
        pgo.get_local_code_state(KEY)
    return bool(carried.loaded), " ".join(warned)


def crafted(package: str, tell_tale: str) -> Iterator[tuple[str, Change]]:
    """Name and maker of each; the maker is given the directory, which is not there."""
    cache = importlib.import_module(f"{package}.compile_cache")
    machine = cache.machine_of(DEVICE)
    cache.machine_of = lambda device: machine  # it asks the system, which is no finding
    script = f"touch {tell_tale}".encode()
    command = b"cos\nsystem\n(X" + len(script).to_bytes(4, "little") + script + b"tR."
    pickles = command, pickle.dumps(defaultdict(dict))
    # What is behind a pickle's end is not read: both are of one size.
    harmful, harmless = (artifacts(it.ljust(max(map(len, pickles)))) for it in pickles)

    def save(directory: Path, content: bytes = harmful, **facts: Any) -> Path:
        facts = {"machine": machine, "cold_seconds": 9.0} | facts
        cache.save(directory, NAME, cache.pack([content]), facts)
        return next(directory.glob("*.zip"))

    def then(change: Callable[[Path, Path], object]) -> Change:
        """Save, and change the data or the note."""
        return lambda directory: change(save(directory), directory / f"{NAME}.json")

    def note(**fields: Any) -> Change:
        def edit(data: Path, path: Path) -> None:
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))

        return then(edit)

    def elsewhere(path: Path) -> None:
        os.rename(path, path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    def replaced(path: Path, make: Callable[[Path], object]) -> None:
        path.unlink()
        make(path)

    def tampered(directory: Path) -> None:
        data, content = save(directory, harmless), cache.pack([harmful])
        assert len(content) == data.stat().st_size
        with open(data, "r+b") as file:
            file.write(content)

    def copied(directory: Path) -> None:
        save(directory.with_name("theirs"))
        shutil.copytree(directory.with_name("theirs"), directory)

    def linked(directory: Path) -> None:
        save(directory.with_name("theirs"))
        directory.symlink_to("theirs")

    yield OWN, save
    for what, number in (("directory", 0), ("data", 1), ("note", 2)):

        def of(data: Path, path: Path, number: int = number) -> Path:
            return (path.parent, data, path)[number]

        for mode in (0o777, 0o770, 0o707, 0o720, 0o702):
            yield (
                f"{what} with mode {mode:o}",
                then(lambda data, path, of=of, mode=mode: of(data, path).chmod(mode)),
            )
        if os.geteuid() == 0:
            yield (
                f"{what} of another user",
                then(lambda data, path, of=of: os.chown(of(data, path), 12345, -1)),
            )
        if number:
            for kind, change in (
                ("a link", elsewhere),
                ("a pipe", lambda it: replaced(it, os.mkfifo)),
                ("a directory", lambda it: replaced(it, Path.mkdir)),
                ("nothing", lambda it: replaced(it, Path.touch)),
                ("2 GB", lambda it: os.truncate(it, 2 << 30)),
                ("cut off", lambda it: os.truncate(it, it.stat().st_size // 2)),
            ):
                yield (
                    f"{what}: {kind}",
                    then(lambda data, path, of=of, change=change: change(of(data, path))),
                )
    yield "changed bytes", tampered
    yield "another run's, copied", copied
    yield "another run's, linked", linked
    yield "data replaced", then(lambda data, path: replaced(data, lambda it: it.touch()))
    yield (
        "data copied",
        then(
            lambda data, path: (
                shutil.copy2(data, path.parent / "x"),
                os.replace(path.parent / "x", data),
            )
        ),
    )
    for key in machine:
        yield f"another {key}", note(machine=machine | {key: "2.0"})
        yield (
            f"another {key}, of control characters",
            note(machine=machine | {key: "\x1b[2J" * 999}),
        )
    yield "no machine", note(machine={})
    outside = ("../x.zip", "/etc/hostname", "..", ".", "", "a/b", "a\0b", "\x1b[2J", "x" * 9999)
    for value in (None, True, -1, 0.5, 1e999, 10**400, [], {}, *outside):
        for field in ("file", "inode", "sha256"):
            yield f"{field} is {value!a:.20}", note(**{field: value})
    for value in (None, 1, [], [1], "torch"):
        yield f"machine is {value!r}", note(machine=value)
    for text in ("{", "[]", "null", "[" * 900_000, "1" * 900_000, "\ud800", '{"file": 1}'):
        content = text.encode("utf-8", "surrogatepass")
        yield f"note: {text:.12}", then(lambda data, path, c=content: path.write_bytes(c))
