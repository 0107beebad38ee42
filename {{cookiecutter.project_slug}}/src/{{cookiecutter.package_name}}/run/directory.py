"""Manage a run's directory: one writer at a time, visible to all ranks, never overwritten."""

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
# What status.json says of the start that trained.
ORIGIN = {"ranks", "machine", "versions", "source"}
# Settings that belong to one run, and are not taken over by another. "workflow" is a whole section.
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
# Settings that a restart does not take from the run that it resumes.
OF_ONE_START = {*OF_ONE_RUN, "device", "train.loader_workers", "tracker.uri"}
OF_ONE_START |= {"checkpoint.url", "checkpoint.local_first"}


def with_saved(config: Any, read: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the saved settings of the run to resume, overridden by the command line.

    `config` is the command line over presets and defaults; `read(saved)` reads the command line
    over saved settings. Raises UserError if the saved settings cannot be used.
    """
    begun = any((config.directory / "checkpoints").glob("step_*"))
    store = None
    # Use the settings in the store if there are no checkpoints on this disk, or if the machines
    # share only the store (`far`), since their run directories may have different settings.
    if config.checkpoint.far or not begun:
        # Only projects with an object store have a `url`.
        store = getattr(config.checkpoint, "url", None)
    if config.fresh or not (begun or store):
        return config
    saved: dict[str, Any] | None = None
    # `where` is the source of the settings, for the message of an error.
    if store:
        where = store
        way_out = "give all settings with --config FILE.json"
        # Outside of the `try` below, since an error of the store already says what to do.
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
        # With --checkpoint.frozen no, a resume must read the weights that the checkpoints leave
        # out, so it also takes --init-from. But a store must not choose the files that a run reads.
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
    """Log the saved settings that differ: `before` is without the saved ones, `after` with them."""
    texts: list[str] = []
    for name, value in after.items():
        # Another log line gives the number of steps.
        if name != "train.steps" and value != before.get(name):
            texts.append(f"{name} {value!s:.60} (default: {before.get(name)})")
    if texts:
        log.info("using the saved settings of the run: %s", ", ".join(texts))


# Locked while a run is active in this process.
_only_run = threading.Lock()


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Run a block as the only run of this process; UserError if another thread has one."""
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
    """Lock an open file until it is closed; return its lines after the first, which is the owner.

    Raises UserError, which names the path `used`, if another process has locked it.
    """
    file.seek(0)
    owner, *lines = file.read().splitlines() or ["another process"]
    # lockf takes a POSIX record lock, which forked loader workers do not inherit. They would
    # inherit a lock of flock, and keep it after the trainer was killed.
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
    """Write into a locked file that this process owns it, followed by `lines`."""
    # Python repeats os.ftruncate, but not file.truncate, when a signal interrupts it.
    os.ftruncate(file.fileno(), 0)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    file.writelines(f"{line}\n" for line in (owner, *lines))
    file.flush()


class Running(NamedTuple):
    """The objects from which to record why an error ended the run."""

    state: "State"
    stop: Stop


class RunDirectory:
    """Locks a run directory and opens its logs; `fresh` first renames an old run of that name.

    With `apart` the machines need not share the directory, since checkpoints are in a store.
    """

    def __init__(self, path: Path, group: Group, fresh: bool = False, apart: bool = False) -> None:
        self.path = path
        self.group = group
        self.fresh = fresh
        self.apart = apart
        self.logs = contextlib.ExitStack()
        # The locked open file, on the rank that holds the lock.
        self.lock: Any = None
        # The values of ORIGIN.
        self.origin: dict[str, Any] = {}
        # Set from `begin` until the end of the run is recorded.
        self.running: Running | None = None

    def __enter__(self) -> "RunDirectory":
        """Lock the directory; UserError when another run has it, or a rank does not see it."""
        group = self.group
        # The names of the torchruns that started the ranks; [] without torchrun.
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
        # This also writes the error to the log file.
        self.logs.__exit__(kind, error, *rest)
        if self.lock:
            # A run that has begun has more files than these.
            with contextlib.suppress(OSError):
                if set(os.listdir(self.path)) <= {".lock", LOGS}:
                    shutil.rmtree(self.path)
            self.lock.close()

    def begin(self, state: "State", stop: Stop, spec: dict[str, Any]) -> None:
        """Write the settings, the data's spec and the status "running"; RankError on failure."""
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
        """Tell whether status.json says that the run finished at this step of `steps` steps."""
        expected = {"status": "finished", "step": step, "steps": steps}
        with contextlib.suppress(UserError):
            recorded = read_json(self.path / "status.json")
            return expected.items() <= recorded.items()
        return False

    def record_status(self, status: str, step: int, **details: Any) -> None:
        """Record in status.json how the run ended, unless it is recorded already.

        If that fails, it only logs a warning.
        """
        self.running = None
        with contextlib.suppress(UserError):
            recorded = read_json(self.path / "status.json")
            if (recorded.get("status"), recorded.get("step")) == (status, step):
                return
            # If nothing was left to train, `begin` was not called, and `origin` is empty: keep
            # what the start that trained has recorded.
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
        """Record how the run ended: by a failure, or by a stop that did not save its last step."""
        if self.group.rank != 0:
            return
        state = running.state
        stopped = isinstance(error, KeyboardInterrupt) or running.stop.signal is not None
        reason = str(error) or type(error).__name__
        saved = None
        if state.checkpointer:
            saved = state.checkpointer.last_good
        # If this fails, `error` must still be reported.
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
        with naming(self.path / ".lock"):
            launchers_before = self._lock()
            # If the launcher is the same, torchrun has restarted the job: then --fresh must not
            # rename the run again but resume it.
            is_restart = not launchers_before.isdisjoint(launchers)
            is_empty = set(os.listdir(self.path)) <= {".lock"}
            if self.fresh and not is_restart and not is_empty:
                rename_directory(self.path, self._name_for_old_run())
                # The locked file was renamed with the directory, so lock one in a new directory.
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
        # Another run has renamed or removed the directory meanwhile: lock the new one instead.
        file.close()
        return self._lock()
