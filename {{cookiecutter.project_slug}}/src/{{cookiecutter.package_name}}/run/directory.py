"""A run's directory: one writer at a time, seen by all ranks, never overwritten."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

import torch

from ..distributed import Group, launcher
from ..errors import RankError, UserError
from ..files import naming, open_to_write, read_json, to_json, write_json
from .hardware import where_measured
from .logs import ONLY_IN_FILES, LogFile, logging_to

log = logging.getLogger(__name__)
LOGS = "logs"


class RunDirectory:
    """Locks a run directory and opens its logs; `fresh` first renames an old run of that name.

    The lock is a POSIX record lock: unlike flock it is not inherited by forked loader workers,
    which would hold it after the trainer was killed. `apart`: the machines need not share the
    directory, since the checkpoints are in a store.
    """

    lock: Any = None  # the open file, while it is held
    begun = False

    def __init__(self, path: Path, group: Group, fresh: bool = False, apart: bool = False) -> None:
        self.path, self.group, self.fresh, self.apart = path, group, fresh, apart
        self.logs = contextlib.ExitStack()
        self.origin: dict[str, Any] = {}  # the machine and the versions

    def __enter__(self) -> "RunDirectory":
        """Lock the directory; UserError when another run has it, or not all ranks see it."""
        launchers = [str(name) for name in self.group.agree(launcher) if name]
        self.group.from_first(lambda: self._take(launchers))
        if self.apart:
            self.group.agree(lambda: self.path.mkdir(parents=True, exist_ok=True))
        else:
            self.group.prove_shared(self.path)
        self.group.agree(self._open_log)
        console = self.logs.enter_context(logging_to(self.log, self.group))
        if console:
            self.logs.enter_context(self.group.printing_to(self.log.stream, console))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        """Release the directory, and remove it if the run never began."""
        self.logs.__exit__(kind, *rest)
        if self.lock:
            if kind and self.begun and self.group.rank == 0:
                with contextlib.suppress(OSError):  # the error that ended the run is reported
                    self._write_status("failed", reason=kind.__name__)
            with contextlib.suppress(OSError):
                if self._is_there(self.lock) and set(os.listdir(self.path)) <= {".lock", LOGS}:
                    shutil.rmtree(self.path / LOGS, ignore_errors=True)
                    (self.path / ".lock").unlink(missing_ok=True)
                    self.path.rmdir()
            self.lock.close()

    def begin(self, config: Any, step: int, device: torch.device) -> None:
        """Write the settings, and that the run is under way from `step`; RankError if it cannot.

        From now on status.json names the machine and the versions, too.
        """
        self.origin = where_measured(device)
        self.group.from_first(lambda: write_json(self.path / "config.json", to_json(config)))
        self.group.from_first(lambda: self._write_status("running", step=step))
        self.begun = True

    def record_status(self, status: str, **details: Any) -> None:
        """Write to status.json how the run ended; a warning where that fails."""
        self.begun = False  # so `__exit__` does not overwrite it
        if self.group.rank == 0:
            try:
                self._write_status(status, **details)
                log.info("%s: %s", status, details, extra=ONLY_IN_FILES)
            except OSError as error:
                log.warning("status.json cannot be written (%s): %s", status, error)

    def record_again(self, config: Any, status: str, step: int) -> None:
        """Record how a run ended before this start, unless its files are here and say so."""
        found: dict[str, Any] = {}
        with contextlib.suppress(UserError):
            found = read_json(self.path / "status.json")
        if (found.get("status"), found.get("step")) != (status, step):
            self.record_status(status, step=step)
        if self.group.rank == 0 and not (settings := self.path / "config.json").exists():
            with contextlib.suppress(OSError):
                write_json(settings, to_json(config))  # they name the store of its checkpoints

    def record_stop(self, error: BaseException | None, signal: int | None, state: Any) -> None:
        """Record a stop whose last step is not saved: by a second Ctrl-C, or a save that failed.

        To be called once the checkpointer has ended.
        """
        if isinstance(error, KeyboardInterrupt):
            reason = f"stopped at once in step {state.step + 1}"
        elif isinstance(error, RankError) and signal is not None:
            reason = f"preempted at step {state.step}, which was not saved: {error}"
        else:
            return
        if self.begun:
            saved = state.checkpointer and state.checkpointer.last_good
            self.record_status("preempted", step=state.step, saved_step=saved, reason=reason)
            if self.group.rank == 0:
                what = "no step is saved" if saved is None else f"step {saved} is saved"
                log.warning("%s; %s. To resume: the same command again", reason, what)

    def _write_status(self, status: str, **details: Any) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        content = {"status": status, "at": at, **details, **self.origin}
        write_json(self.path / "status.json", content)

    def _open_log(self) -> None:
        rank, folder = self.group.rank, self.path / LOGS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (f"rank_{rank}.log" if rank else "train.log")
        with naming(path):
            self.log = LogFile(path)

    def _take(self, launchers: list[str]) -> None:
        # A job that torchrun restarts must resume its run, and not rename it as an old one.
        ours = not self._lock().isdisjoint(launchers)
        for path in self.path.glob(".nonce-*"):  # of a start that failed or was killed
            if path.is_file():
                path.unlink()
        if self.fresh and not ours and set(os.listdir(self.path)) > {".lock"}:
            names = (self.path.with_name(f"{self.path.name}.old-{n}") for n in range(1, 10_000))
            os.rename(self.path, next(name for name in names if not name.exists()))
            self.lock.close()
            self._lock()
        if (large := self.path / "checkpoints").is_symlink():
            log.info("%s is a link to %s", large, large.resolve())
        with naming(self.path / ".lock"):
            self.lock.writelines(f"{name}\n" for name in launchers)
            self.lock.flush()

    def _is_there(self, lock: IO[str]) -> bool:
        """Whether the open lock file is still the one in the directory."""
        try:
            return os.path.samestat(os.fstat(lock.fileno()), os.stat(self.path / ".lock"))
        except FileNotFoundError:
            return False

    def _lock(self) -> set[str]:
        """Lock the directory; returns the launchers of the process that held it last."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with naming(self.path / ".lock"):
                file = open_to_write(self.path / ".lock", "a+", errors="replace")
        except OSError as error:
            raise UserError(f"{self.path} cannot be used as a run directory: {error}") from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                file.seek(0)
                owner = file.readline().strip() or "another process"
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise UserError(f"{self.path} is on a file system without locks: {error}") from None
            advice = "wait for it or stop it, or choose another --name"
            raise UserError(f"{self.path} is in use by {owner}: {advice}") from None
        if not self._is_there(file):  # another run has renamed or removed the directory since
            file.close()
            return self._lock()
        self.lock = file
        with naming(self.path / ".lock"):
            file.seek(0)
            before = set(file.read().splitlines()[1:])
            os.ftruncate(file.fileno(), 0)  # goes on when a signal interrupts it
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        return before
