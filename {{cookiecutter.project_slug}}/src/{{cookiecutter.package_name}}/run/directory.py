"""A run's directory: one writer at a time, seen by all ranks, never overwritten."""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checkpoint import CheckpointError
from ..checkpoint.manifest import read_manifest
from ..checkpoint.paths import published
from ..distributed import Group, launcher
from ..distributed.stop import Stop
from ..errors import UserError
from ..files import (
    flatten,
    goes_without_lock,
    naming,
    open_to_write,
    read_json,
    rename_directory,
    to_json,
    write_json,
)
from .hardware import where_measured
from .logs import ONLY_IN_FILES, logging_in
from .source_code import code_version

if TYPE_CHECKING:
    from ..train import State

log = logging.getLogger(__name__)
LOGS = "logs"
OF_ONE_RUN = (
    "name",
    "run_dir",
    "fresh",
    "reset_optimizer",
    "init_from",
    "init_strict",
    "init_new",
    "workflow",
)
# Settings that a start does not take from the run that it continues.
OF_ONE_START = {*OF_ONE_RUN, "device", "train.loader_workers", "tracker.uri"}
OF_ONE_START |= {"checkpoint.url", "checkpoint.local_first"}


def with_saved(config: Any, read: Callable[[dict[str, Any]], Any]) -> Any:
    """The settings of a start: those of the run that it continues, overridden by what is typed.

    `config` is what was typed, over the defaults; `read` reads it over given settings. UserError
    if the run's settings cannot be used.
    """
    begun = any((config.directory / "checkpoints").glob("step_*"))
    # Machines that have only a store in common could have other settings in their run directories.
    store = None
    if config.checkpoint.far or not begun:
        store = getattr(config.checkpoint, "url", None)
    if config.fresh or not (begun or store):
        return config
    saved: dict[str, Any] | None = None
    if store:
        where = store
        way_out = "give all settings by --config FILE.json"
        saved = config.checkpoint.saved_settings(config.name)
    elif (config.directory / "config.json").exists():
        where = config.directory / "config.json"
        way_out = "correct it, or remove the file"
    else:
        where = config.directory / "checkpoints"
        way_out = "copy the run's config.json, or give all settings by --config FILE.json"
    try:
        if where == config.directory / "checkpoints":
            saved = settings_in_checkpoints(where)
        elif saved is None:
            saved = read_json(where)
        taken: dict[str, Any] = {}
        not_taken = set(OF_ONE_START)
        if saved.get("checkpoint", {}).get("frozen") == "no":
            # Each start reads the weights that the checkpoints leave out.
            not_taken -= {"init_from", "init_new"}
        for name, value in flatten(saved):
            section = name.partition(".")[0]
            if name not in not_taken and section not in not_taken:
                taken[name] = value
        result = read(taken)
    except (UserError, RecursionError) as error:
        raise UserError(f"{error} (of {where}: {way_out})") from None
    _log_taken(dict(flatten(to_json(config))), dict(flatten(to_json(result))))
    return result


def settings_in_checkpoints(directory: Path) -> dict[str, Any]:
    """Read a run's settings from its newest manifest that is good; UserError if none has them."""
    for path in reversed(published(directory)):
        with contextlib.suppress(CheckpointError):
            settings = read_manifest(path)["config"]
            if settings:
                log.warning("config.json is missing: the settings are those in %s", path)
                return settings
    raise UserError("config.json is missing, and no checkpoint has the run's settings")


def _log_taken(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Log the settings that were taken from the run and differ from the defaults."""
    texts: list[str] = []
    for name, value in after.items():
        # Another line says how many steps there are.
        if name != "train.steps" and value != before.get(name):
            texts.append(f"{name} {value!s:.60} (default: {before.get(name)})")
    if texts:
        log.info("settings of the run, unless you type others: %s", ", ".join(texts))


# Held by the run of this process.
_only_run = threading.Lock()


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Run a block as the only run of this process; UserError if there is one in another thread."""
    if not _only_run.acquire(blocking=False):
        raise UserError(
            "another run is under way in this process, and both would draw from torch's random "
            "numbers: start each in a process of its own, or one after the other"
        )
    try:
        yield
    finally:
        _only_run.release()


def lock_file(file: Any, used: Path) -> list[str]:
    """Lock an open file until it is closed; return the lines below its owner's.

    UserError, which says that `used` is in use, if another process has locked it.
    """
    file.seek(0)
    owner, *lines = file.read().splitlines() or ["another process"]
    # A POSIX record lock: unlike flock it is not inherited by forked loader workers, which would
    # hold it after the trainer was killed.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not goes_without_lock(error, used):
            file.close()
            advice = "wait for it or stop it, or choose another --name"
            problem = f"{used} is in use by {owner} ({error.strerror})"
            raise UserError(f"{problem}: {advice}") from None
    return lines


def write_owner(file: Any, *lines: str) -> None:
    """Write into a locked file that this process has it, and more lines."""
    # Python repeats this call when a signal interrupts it.
    os.ftruncate(file.fileno(), 0)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    file.writelines(f"{line}\n" for line in (owner, *lines))
    file.flush()


class Running(NamedTuple):
    """What is asked about a run when an error has ended it."""

    state: "State"
    stop: Stop


class RunDirectory:
    """Locks a run directory and opens its logs; `fresh` first renames an old run of that name.

    `apart`: the machines need not share the directory, since the checkpoints are in a store.
    """

    def __init__(self, path: Path, group: Group, fresh: bool = False, apart: bool = False) -> None:
        if fresh and apart:
            raise UserError("--fresh does not clear an object store: give another --checkpoint.url")
        self.path = path
        self.group = group
        self.fresh = fresh
        self.apart = apart
        self.logs = contextlib.ExitStack()
        # The open file that is locked, on the rank that holds the lock.
        self.lock: Any = None
        # The machine and the versions.
        self.origin: dict[str, Any] = {}
        # From `begin` until the end is recorded.
        self.running: Running | None = None

    def __enter__(self) -> "RunDirectory":
        """Lock the directory; UserError when another run has it, or not all ranks see it."""
        group = self.group
        launchers = [name for name in group.gather(launcher()) if name]
        with group.together():
            if group.is_first:
                self._take(launchers)
        if not self.apart:
            group.prove_shared(self.path)
        with group.together():
            self.logs.enter_context(logging_in(self.path / LOGS, group))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *rest: Any) -> None:
        """Release the directory, and remove it if the run never began."""
        if error and self.running:
            self._record_error(error, self.running)
        self.logs.__exit__(kind, error, *rest)
        if self.lock:
            with contextlib.suppress(OSError):
                if set(os.listdir(self.path)) <= {".lock", LOGS}:
                    shutil.rmtree(self.path)
            self.lock.close()

    def begin(self, state: "State", stop: Stop, spec: dict[str, Any]) -> None:
        """Write the settings, the data's spec, and that the run is under way; RankError if not."""
        self.origin = {"ranks": self.group.size, **where_measured(state.world.device)}
        if self.group.is_first:
            self.origin["source"] = code_version()
        with self.group.together():
            if self.group.is_first:
                write_json(self.path / "config.json", to_json(state.config))
                write_json(self.path / "spec.json", spec)
                self._write_status("running", step=state.step)
        self.running = Running(state, stop)

    def ended(self, step: int, steps: int) -> bool:
        """Tell whether this run finished at this step, of as many steps as it has to take now."""
        expected = {"status": "finished", "step": step, "steps": steps}
        with contextlib.suppress(UserError):
            return expected.items() <= read_json(self.path / "status.json").items()
        return False

    def record_status(self, status: str, step: int, **details: Any) -> None:
        """Write to status.json how the run ended, unless it says so already.

        A disk that fails is only a warning.
        """
        self.running = None
        with contextlib.suppress(UserError):
            recorded = read_json(self.path / "status.json")
            if (recorded.get("status"), recorded.get("step")) == (status, step):
                return
        if self.group.rank == 0:
            try:
                self._write_status(status, step=step, **details)
                log.info("%s: %s", status, {"step": step, **details}, extra=ONLY_IN_FILES)
            except OSError as error:
                log.warning("status.json cannot be written (%s): %s", status, error)

    def _record_error(self, error: BaseException, running: Running) -> None:
        """Record what ended the run: a failure, or a stop that did not save its last step."""
        if self.group.rank != 0:
            return
        state = running.state
        stopped = isinstance(error, KeyboardInterrupt) or running.stop.signal is not None
        reason = str(error) or type(error).__name__
        saved = None
        if state.checkpointer:
            saved = state.checkpointer.last_good
        # `error` is reported even if this fails.
        with contextlib.suppress(OSError):
            status = "preempted" if stopped else "failed"
            self._write_status(status, step=state.step, saved_step=saved, reason=reason)
        if stopped:
            what = "no step is saved" if saved is None else f"step {saved} is saved"
            text = "stopped at step %d (%s); %s. To resume: the same command again"
            log.warning(text, state.step, reason, what)

    def _write_status(self, status: str, **details: Any) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        content = {"status": status, "at": at, **details, **self.origin}
        write_json(self.path / "status.json", content)

    def _take(self, launchers: list[str]) -> None:
        with naming(self.path / ".lock"):
            launchers_before = self._lock()
            # The launcher is the same when torchrun has restarted the job. Then the run is resumed,
            # and not renamed as an old one.
            is_restart = not launchers_before.isdisjoint(launchers)
            is_empty = set(os.listdir(self.path)) <= {".lock"}
            if self.fresh and not is_restart and not is_empty:
                rename_directory(self.path, self._name_for_old_run())
                self.lock.close()
                self._lock()
            write_owner(self.lock, *launchers)

    def _name_for_old_run(self) -> Path:
        """Return a path beside the directory that nothing has."""
        number = 1
        path = self.path.with_name(f"{self.path.name}.old-{number}")
        while path.exists():
            number += 1
            path = self.path.with_name(f"{self.path.name}.old-{number}")
        return path

    def _lock(self) -> set[str]:
        """Lock the directory; return the launchers of the process that held it last."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open_to_write(self.path / ".lock", "a+", errors="replace")
        except OSError as error:
            raise UserError(f"{self.path} cannot be a run directory: {error}") from None
        launchers = lock_file(file, self.path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path / ".lock")):
                self.lock = file
                return set(launchers)
        # Another run has renamed or removed the directory since: the lock is of no use.
        file.close()
        return self._lock()
