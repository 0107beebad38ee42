"""Manage a run's directory: its lock, its saved settings and its status.json.

One run at a time uses the directory, and all ranks must see it. A run with --fresh renames the
directory of an old run, so nothing is overwritten.
"""

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
# Fields of status.json that say where, and with what code, the run was last trained.
ORIGIN = {"ranks", "machine", "versions", "source"}
# Settings that a run does not take from the config.json of another run (--config). "workflow" is a
# whole section of settings.
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
# Settings that a start does not take from the saved settings of the run that it resumes.
OF_ONE_START = {*OF_ONE_RUN, "device", "train.loader_workers", "tracker.uri"}
OF_ONE_START |= {"checkpoint.url", "checkpoint.local_first"}


def with_saved(config: Any, read: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the saved settings of the run to resume, overridden by the command line.

    `config` has the settings without the saved ones: defaults, overridden by presets and by the
    command line. It is returned if there is no run to resume. `read(saved)` reads the command line
    again, on top of `saved`. Raises UserError if the saved settings cannot be used.
    """
    begun = any((config.directory / "checkpoints").glob("step_*"))
    store = None
    # Read the settings from the store if this disk has no checkpoints. Also read them from there if
    # the machines share only the store (`far`): settings on their own disks may differ.
    if config.checkpoint.far or not begun:
        # Only projects with an object store have a `url`.
        store = getattr(config.checkpoint, "url", None)
    if config.fresh or not (begun or store):
        return config
    saved: dict[str, Any] | None = None
    # `where` is the source of the settings, which the message of an error names.
    if store:
        where = store
        way_out = "give all settings with --config FILE.json"
        # This is outside of the `try` below, since an error of the store already says what to do.
        saved = config.checkpoint.saved_settings(config.name)
    elif (config.directory / "config.json").exists():
        where = config.directory / "config.json"
        way_out = "correct it, or remove the file"
    else:
        where = config.directory / "checkpoints"
        way_out = "copy the run's config.json, or give all settings with --config FILE.json"
    try:
        if where == config.directory / "checkpoints":
            saved = settings_in_checkpoints(where)
        elif not store:
            saved = read_json(where)
        assert saved is not None
        taken: dict[str, Any] = {}
        not_taken = set(OF_ONE_START)
        # With --checkpoint.frozen no, checkpoints leave out the frozen weights, and a resume reads
        # them from the saved --init-from. Do not take that path from a store: those who can write
        # to the store must not choose the files that a run reads.
        if not store and dict(flatten(saved)).get("checkpoint.frozen") == "no":
            not_taken -= {"init_from", "init_new"}
        for name, value in flatten(saved):
            section = name.partition(".")[0]
            if name not in not_taken and section not in not_taken:
                taken[name] = value
        result = read(taken)
    except (UserError, RecursionError) as error:
        raise UserError(f"{error} (in {where}: {way_out})") from None
    _log_taken(dict(flatten(to_json(config))), dict(flatten(to_json(result))))
    return result


def settings_in_checkpoints(directory: Path) -> dict[str, Any]:
    """Read a run's settings from its newest good manifest; UserError if none has them."""
    for path in reversed(published(directory)):
        with contextlib.suppress(CheckpointError):
            settings = read_manifest(path)["config"]
            if settings:
                log.warning("config.json is missing: using the settings in %s", path)
                return settings
    raise UserError("config.json is missing, and no checkpoint has the run's settings")


def _log_taken(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Log the settings that the saved ones have changed: from `before` to `after`."""
    texts: list[str] = []
    for name, value in after.items():
        # `log_start` logs the number of steps.
        if name != "train.steps" and value != before.get(name):
            texts.append(f"{name} {value!s:.60} (default: {before.get(name)})")
    if texts:
        log.info("using the saved settings of the run: %s", ", ".join(texts))


# Locked while a run is active in this process.
_only_run = threading.Lock()


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Run a block as the only run in this process; UserError if another run is active."""
    if not _only_run.acquire(blocking=False):
        raise UserError(
            "another run is active in this process, and both would use torch's global random "
            "generator: start each in its own process, or one after the other"
        )
    try:
        yield
    finally:
        _only_run.release()


def lock_file(file: Any, used: Path) -> list[str]:
    """Lock an open file until it is closed; return its lines except the first, the owner's name.

    If another process has locked the file, raises UserError, which says that the other process uses
    the path `used`.
    """
    file.seek(0)
    owner, *lines = file.read().splitlines() or ["another process"]
    # lockf takes a POSIX record lock, which forked loader workers do not inherit. A lock of flock
    # would be inherited by the workers, which could keep it after the trainer was killed.
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
    """Replace the content of a locked file with the name of this process, followed by `lines`."""
    # After an interruption by a signal, Python repeats os.ftruncate, but not file.truncate.
    os.ftruncate(file.fileno(), 0)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    file.writelines(f"{line}\n" for line in (owner, *lines))
    file.flush()


class Running(NamedTuple):
    """The objects that `_record_error` reads when an error ends a run that has begun."""

    state: "State"
    stop: Stop


class RunDirectory:
    """Locks a run directory, opens its logs, and records in status.json how the run ends.

    With `fresh`, it first renames an old run's directory at this path. With `apart`, the machines
    need not share the directory, since checkpoints are in a store.
    """

    def __init__(self, path: Path, group: Group, fresh: bool = False, apart: bool = False) -> None:
        self.path = path
        self.group = group
        self.fresh = fresh
        self.apart = apart
        self.logs = contextlib.ExitStack()
        # The open file that is locked; None on the ranks that do not hold the lock.
        self.lock: Any = None
        # The values of the fields in ORIGIN.
        self.origin: dict[str, Any] = {}
        # Set by `begin`, and None again once `record_status` is called at the end of the run.
        self.running: Running | None = None

    def __enter__(self) -> "RunDirectory":
        """Lock the directory and open the logs; collective.

        All ranks raise UserError if another run uses the directory, or if a rank does not see it.
        """
        group = self.group
        # The names of the torchrun processes that started the ranks; [] without torchrun.
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
        # Closing the logs also writes the error to the log file.
        self.logs.__exit__(kind, error, *rest)
        if self.lock:
            # A run that has begun has written more files than these.
            with contextlib.suppress(OSError):
                if set(os.listdir(self.path)) <= {".lock", LOGS}:
                    shutil.rmtree(self.path)
            self.lock.close()

    def begin(self, state: "State", stop: Stop, spec: dict[str, Any]) -> None:
        """Write the settings, the data's spec and the status "running"; collective.

        If rank 0 cannot write them, all ranks raise RankError.
        """
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
        """Return whether status.json says that a run of `steps` steps has finished at `step`."""
        expected = {"status": "finished", "step": step, "steps": steps}
        with contextlib.suppress(UserError):
            recorded = read_json(self.path / "status.json")
            return expected.items() <= recorded.items()
        return False

    def record_status(self, status: str, step: int, **details: Any) -> None:
        """Record in status.json how the run ended, unless status.json already says so.

        If status.json cannot be written, this only logs a warning.
        """
        self.running = None
        with contextlib.suppress(UserError):
            recorded = read_json(self.path / "status.json")
            if (recorded.get("status"), recorded.get("step")) == (status, step):
                return
            # If no steps were left to train, `begin` was not called, and `origin` is empty. Then
            # keep the fields that an earlier start has recorded.
            for name in ORIGIN - self.origin.keys():
                if name in recorded:
                    self.origin[name] = recorded[name]
        if self.group.rank == 0:
            try:
                self._write_status(status, step=step, **details)
                log.info("%s: %s", status, {"step": step, **details}, extra=ONLY_IN_FILES)
            except OSError as error:
                log.warning("status.json cannot be written (%s): %s", status, error)

    def _record_error(self, error: BaseException, running: Running) -> None:
        """Record that the run failed, or that it was stopped without saving its last step."""
        if self.group.rank != 0:
            return
        state = running.state
        stopped = isinstance(error, KeyboardInterrupt) or running.stop.signal is not None
        reason = str(error) or type(error).__name__
        saved = None
        if state.checkpointer:
            saved = state.checkpointer.last_good
        # If this write fails, `error` must still be reported.
        with contextlib.suppress(OSError):
            status = "preempted" if stopped else "failed"
            self._write_status(status, step=state.step, saved_step=saved, reason=reason)
        if stopped:
            what = "no step is saved" if saved is None else f"step {saved} is saved"
            text = "stopped at step %d (%s); %s. To resume, run the same command again"
            log.warning(text, state.step, reason, what)

    def _write_status(self, status: str, **details: Any) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        content = {"status": status, "at": at, **details, **self.origin}
        write_json(self.path / "status.json", content)

    def _take(self, launchers: list[str]) -> None:
        """Lock the directory and write who holds it; with `fresh`, rename an old run before."""
        with naming(self.path / ".lock"):
            launchers_before = self._lock()
            # If a launcher is the same as before, torchrun has restarted the ranks. The first start
            # has already renamed the old run for --fresh, so this one resumes the new run.
            is_restart = not launchers_before.isdisjoint(launchers)
            is_empty = set(os.listdir(self.path)) <= {".lock"}
            if self.fresh and not is_restart and not is_empty:
                rename_directory(self.path, self._name_for_old_run())
                # The locked file has moved with the directory: lock another one in a new directory.
                self.lock.close()
                self._lock()
            write_owner(self.lock, *launchers)

    def _name_for_old_run(self) -> Path:
        """Return an unused path next to the directory."""
        number = 1
        path = self.path.with_name(f"{self.path.name}.old-{number}")
        while path.exists():
            number += 1
            path = self.path.with_name(f"{self.path.name}.old-{number}")
        return path

    def _lock(self) -> set[str]:
        """Lock the directory; return the launchers that the last run in it has written."""
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
        # After this file was opened, another run has renamed or removed the directory. Lock the
        # directory that is now at this path.
        file.close()
        return self._lock()
