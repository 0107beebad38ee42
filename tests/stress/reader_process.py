"""Reads crafted checkpoints and files, by every way that a project has, and watches what happens.

Usage: reader_process.py FOLDER START STOP MUTANTS BOUNDED SEED; writes a line of JSON before
and after each case, so that whoever started it knows which one ended it.
"""

import contextlib
import ctypes
import hashlib
import importlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = {"dcp": "hostile_dcp", "torch_save": "hostile_torch_save"}
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess", "pty")
STARTS += ("socket", "ctypes", "webbrowser", "urllib", "marshal.loads", "code.__new__", "import")
STARTS += ("pickle.find_class", "exec", "compile", "builtins.input", "os.kill", "os.putenv")
ON_PATHS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod")
ON_PATHS += ("os.truncate", "os.listdir", "os.scandir", "os.utime", "os.chown", "open")
SPARE = 3 << 30  # bytes of address space that a case may ask for


class Watch:
    """An audit hook: what is done between `arm` and `disarm` that has no business there."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what may not be; nothing is stopped."""
        if self.inside is None:
            return
        if event == "compile" and arguments[1] == "<unknown>":
            return  # traceback looks for the place to underline
        if event == "os.putenv" and arguments[0] == b"TORCHINDUCTOR_CACHE_DIR":
            return  # torch does whenever it looks for its cache
        if event.startswith(STARTS):
            self.seen.append(f"{event} {arguments!a:.100}")
        elif event in ON_PATHS:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                if isinstance(path, str | bytes | os.PathLike) and not self.allowed(event, path):
                    self.seen.append(f"{event} {path!a:.100}")

    def allowed(self, event: str, path: Any) -> bool:
        """Only what is in the folder; tracebacks quote sources, which are read for that."""
        real = os.path.realpath(os.fsdecode(path))
        return f"{real}/".startswith(f"{self.inside}/") or (event == "open" and real[-3:] == ".py")


@contextlib.contextmanager
def watched(watch: Watch, folder: Path) -> Iterator[None]:
    """Watch while inside."""
    watch.seen.clear()
    # torch makes a temporary folder before it refuses its oldest format.
    watch.inside, tempfile.tempdir = folder.resolve(), str(folder.resolve())
    try:
        yield
    finally:
        watch.inside, tempfile.tempdir = None, None


class Reader:
    """A project with a run of three checkpoints, the newest of which is crafted."""

    def __init__(self, package: str, folder: Path) -> None:
        from tests.stress import prepare_checkpoints

        self.package, self.run = package, folder / package
        self.training = self.module("train")
        self.manifest, self.travel = (
            self.module("checkpoint.manifest"),
            self.module("checkpoint.transfer"),
        )
        self.control = self.module("distributed")
        self.clear = (self.module("errors").UserError, self.module("errors").RankError)
        config = prepare_checkpoints.settings(package, self.run, folder / "text.txt")
        self.state = self.training.setup(config)
        group = self.control.Group(self.state.world)
        with self.training.RunDirectory(self.run, group) as run_dir:
            self.training.resume(self.state, run_dir.path, group).close()
        self.facts = self.state.checkpointer.facts

    def module(self, name: str) -> Any:
        """One of its modules."""
        return importlib.import_module(f"{self.package}.{name}")

    def place(self, case: Any, folder: Path) -> Path:
        """Put a case in place; returns what is to be read."""
        if case.kind == "file":
            case.change(folder)
            return next(folder.glob("x.*"))
        run = folder / "run"
        newest = run / "checkpoints/step_00000003"
        newest.parent.mkdir(parents=True)
        shutil.copy(self.run / "config.json", run)
        before = "checkpoints/step_00000002"
        shutil.copytree(self.run / before, run / before, copy_function=os.link)
        shutil.copytree(self.run / "checkpoints/step_00000003", newest)
        if case.kind == "folder":
            (newest / self.manifest.MANIFEST).unlink()
            case.change(newest)
            return newest
        with contextlib.suppress(FileNotFoundError):
            case.change(newest)
        if case.kind == "checkpoint":
            self.seal(newest)
        return run

    def seal(self, newest: Path) -> None:
        """Make the manifest right, as whoever crafted the files can."""
        path = newest / self.manifest.MANIFEST
        content = json.loads(path.read_text("utf-8"))
        del content["digest"]
        for name in content["files"]:
            stored = (newest / name).read_bytes()
            sha256 = hashlib.sha256(stored).hexdigest()
            content["files"][name] = {"size": len(stored), "sha256": sha256}
        path.write_bytes(self.manifest.sealed(content))

    def roads(self, case: Any, where: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Each way of reading: a name, and a function that returns the step that was taken."""
        group = self.control.Group()
        load, model = self.travel.load_weights, self.state.model
        if case.kind in ("file", "folder"):
            out = self.travel.ExportConfig(to=where.parent / "out.pt", source=where)
            yield "--init-from", lambda: load(where, model, None, group) and 3
            yield "export", lambda: self.travel.export(self.run, out) and 3
            return

        def restore() -> int:
            checkpointer = self.training.Checkpointer(
                where,
                self.state.config.checkpoint,
                self.state.world,
                model,
                self.state.optimizer,
                self.facts,
            )
            try:
                return checkpointer.restore()
            finally:
                checkpointer.close()

        def export() -> int:
            to = where.parent / "out.pt"  # with the optimizer's state
            text = self.travel.export(where, self.travel.ExportConfig(to=to))
            return int(text.partition(": step ")[2].split()[0])

        def weights() -> int:
            return int(load(where, model, None, group).partition("/step_")[2][:8])

        def verify() -> int:
            self.module("checkpoint.verify").list_checkpoints(where)
            return 0

        yield "verify", verify
        yield "--init-from", weights
        if case.name.find("mutated") < 0:
            yield "export", export
        yield "resume", restore


def main(folder: Path, start: int, stop: int, mutants: int, bounded: bool, seed: int) -> None:
    """Read the cases with numbers from `start` to `stop`, the last of them `mutants` by chance."""
    from tests.stress import crafted_checkpoints

    logging.disable(logging.CRITICAL)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "case/inductor")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # not to outlive whoever watches
    tell_tale = folder / "executed"
    readers = {answer: Reader(name, folder) for answer, name in PACKAGES.items()}
    rng = random.Random(seed)
    for reader in readers.values():  # what is imported only when it is needed is no finding
        warm = folder / f"warm-{reader.package}"
        warm.mkdir(exist_ok=True)
        "x".encode("cp437")
        case = crafted_checkpoints.Case("warm", "dcp", lambda folder: None)
        for _, read in reader.roads(case, reader.place(case, warm)):
            read()
        shutil.rmtree(warm)
    chosen = list(crafted_checkpoints.cases(str(tell_tale), bounded))
    (folder / "case").mkdir(exist_ok=True)
    fixed = len(chosen)
    for number in range(mutants):
        kind = number % 3
        answer = "torch_save" if kind == 1 else "dcp"
        mutant = (
            crafted_checkpoints.mutated_manifest(rng)
            if kind == 2
            else crafted_checkpoints.mutated(rng, answer)
        )
        chosen.append(mutant)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, size + SPARE))
    watch = Watch()
    for number, case in list(enumerate(chosen))[start:stop]:
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        print(
            json.dumps({"number": number, "of": min(stop, len(chosen)), "name": case.name}),
            flush=True,
        )
        reader = readers[case.answer]
        where = reader.place(case, place)
        problems = []
        began = time.process_time()
        for road, read in reader.roads(case, where):
            with watched(watch, place):
                step, unclear = attempt(read, reader.clear)
            if unclear:
                problems.append(["clear", f"{road}: {unclear}"])
            elif case.refused and step == 3:
                problems.append(["clear", f"{road}: it was read as if it were good"])
            problems += [["executed", f"{road}: {what}"] for what in watch.seen]
        if tell_tale.exists():
            problems.append(["executed", "the tell-tale file is there"])
            shutil.rmtree(tell_tale) if tell_tale.is_dir() else tell_tale.unlink()
        if harmed(reader):
            problems.append(["executed", "something in this process is no longer as it was"])
        result = {
            "number": number,
            "fuzz": number >= fixed,
            "problems": problems,
            "seconds": time.process_time() - began,
        }
        print(json.dumps(result), flush=True)
    shutil.rmtree(folder / "case", ignore_errors=True)


def attempt(read: Callable[[], Any], clear: tuple[type[BaseException], ...]) -> tuple[int, str]:
    """Read once: the step that was read (0: refused), and what was not clear about the refusal."""
    try:
        return int(read()), ""
    except clear as error:
        text = str(error).replace("\n", "")
        if not text or not text.isprintable() or len(text) > 3000:
            return 0, f"a message that is empty, endless or harmful: {text!a:.200}"
        return 0, ""
    except BaseException as error:
        return 0, f"{type(error).__name__}: {error!a:.200}"


def harmed(reader: Reader) -> bool:
    """Whether an attack has changed what it could name."""
    import collections

    import torch
    from torch.distributed.checkpoint import metadata

    things = (metadata.Metadata, torch.Size, torch._utils._rebuild_tensor_v2)
    things += (collections.OrderedDict, Path)
    return any(hasattr(thing, "harmed") for thing in things) or not callable(Path.exists)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    start, stop, mutants, bounded, seed = map(int, sys.argv[2:])
    main(Path(sys.argv[1]), start, stop, mutants, bool(bounded), seed)
