"""A run's directory: one writer at a time, seen by all ranks, never overwritten."""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..distributed import Group, launcher
from ..distributed.stop import Stop
from ..errors import UserError
from ..files import flatten, naming, open_to_write, read_json, to_json, write_json
from .hardware import where_measured
from .logs import ONLY_IN_FILES, logging_in

log = logging.getLogger(__name__)
LOGS = "logs"
OF_ONE_RUN = ("name", "run_dir", "fresh", "reset_optimizer", "init_from", "init_strict", "workflow")
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
    else:
        where = config.directory / "config.json"
        way_out = "correct it, or remove the file"
    try:
        if saved is None:
            saved = read_json(where)
        taken: dict[str, Any] = {}
        for name, value in flatten(saved):
            section = name.partition(".")[0]
            if name not in OF_ONE_START and section not in OF_ONE_START:
                taken[name] = value
        result = read(taken)
    except (UserError, RecursionError) as error:
        raise UserError(f"{error} (of {where}: {way_out})") from None
    _log_taken(dict(flatten(to_json(config))), dict(flatten(to_json(result))))
    return result


def _log_taken(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Name the settings that the run has and that are not the defaults."""
    texts = []
    for name, value in after.items():
        # Another line says how many steps there are.
        if name != "train.steps" and value != before.get(name):
            texts.append(f"{name} {value!s:.60} (default: {before.get(name)})")
    if texts:
        log.info("settings of the run, unless you type others: %s", ", ".join(texts))


class RunDirectory:
    """Locks a run directory and opens its logs; `fresh` first renames an old run of that name.

    `apart`: the machines need not share the directory, since the checkpoints are in a store.
    """

    lock: Any = None  # the open file, on the rank that holds it
    running: tuple[Any, Stop] | None = None  # from `begin` until the end is recorded

    def __init__(self, path: Path, group: Group, fresh: bool = False, apart: bool = False) -> None:
        if fresh and apart:
            raise UserError("--fresh does not clear an object store: give another --checkpoint.url")
        self.path, self.group, self.fresh, self.apart = path, group, fresh, apart
        self.logs = contextlib.ExitStack()
        self.origin: dict[str, Any] = {}  # the machine and the versions

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
            self._record_error(error, *self.running)
        self.logs.__exit__(kind, error, *rest)
        if self.lock:
            with contextlib.suppress(OSError):
                if set(os.listdir(self.path)) <= {".lock", LOGS}:
                    shutil.rmtree(self.path)
            self.lock.close()

    def begin(self, state: Any, stop: Stop, spec: dict[str, Any]) -> None:
        """Write the settings, the data's spec, and that the run is under way; or RankError."""
        self.origin = {"ranks": self.group.size, **where_measured(state.world.device)}
        with self.group.together():
            if self.group.is_first:
                write_json(self.path / "config.json", to_json(state.config))
                write_json(self.path / "spec.json", spec)
                self._write_status("running", step=state.step)
        self.running = state, stop

    def ended(self, step: int, steps: int) -> bool:
        """Whether this run ended here, and is asked for no other number of steps since."""
        expected = {"status": "finished", "step": step, "steps": steps}
        with contextlib.suppress(UserError):
            return expected.items() <= read_json(self.path / "status.json").items()
        return False

    def record_status(self, status: str, step: int, **details: Any) -> None:
        """Write to status.json how the run ended, unless it says so; a warning if that fails."""
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

    def _record_error(self, error: BaseException, state: Any, stop: Stop) -> None:
        """Record what ended the run: a failure, or a stop that did not save its last step."""
        stopped = isinstance(error, KeyboardInterrupt) or stop.signal is not None
        saved, reason = state.checkpointer.last_good, str(error) or type(error).__name__
        details = {"step": state.step, "saved_step": saved, "reason": reason}
        if self.group.rank == 0:
            with contextlib.suppress(OSError):  # `error` is reported in any case
                self._write_status("preempted" if stopped else "failed", **details)
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
            # A job that torchrun restarts must resume its run, and not rename it as an old one.
            ours = not self._lock().isdisjoint(launchers)
            if self.fresh and not ours and set(os.listdir(self.path)) > {".lock"}:
                names = (self.path.with_name(f"{self.path.name}.old-{n}") for n in range(1, 10_000))
                os.rename(self.path, next(name for name in names if not name.exists()))
                self.lock.close()
                self._lock()
            os.ftruncate(self.lock.fileno(), 0)  # retries when a signal interrupts it
            owner = f"process {os.getpid()} on {socket.gethostname()}"
            self.lock.writelines(f"{line}\n" for line in (owner, *launchers))
            self.lock.flush()

    def _lock(self) -> set[str]:
        """Lock the directory; returns the launchers of the process that held it last."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open_to_write(self.path / ".lock", "a+", errors="replace")
        except OSError as error:
            raise UserError(f"{self.path} cannot be a run directory: {error}") from None
        file.seek(0)
        owner, *launchers = file.read().splitlines() or ["another process"]
        # A POSIX record lock: unlike flock it is not inherited by forked loader workers, which
        # would hold it after the trainer was killed.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            advice = "wait for it or stop it, or choose another --name"
            problem = f"{self.path} is in use by {owner} ({error.strerror})"
            raise UserError(f"{problem}: {advice}") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path / ".lock")):
                self.lock = file
                return set(launchers)
        file.close()  # another run has renamed or removed the directory since
        return self._lock()
