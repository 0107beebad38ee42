"""Logs a run to its experiment tracker, which never stops training nor holds it up.

Only one thread, a daemon, calls the tracker. What fails there is a warning, once; the next records
are logged all the same, and the next start logs the lines after the tracker's last one.
"""

import contextlib
import itertools
import logging
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json
from .journal import finite, read_records
from .logs import ONLY_IN_FILES
from .samples import samples_of
from .tracker_adapter import Tracker, TrackerConfig

__all__ = ["TRACKERS", "TrackerConfig"]
log = logging.getLogger(__name__)
PERFORMANCE = re.compile("[a-z_]+_(seconds|per_second|bytes)|mfu")  # figures of the system
LIMIT = 20.0  # seconds to wait for a tracker to open, and to close


class Tracking:
    """A callback: hands each record to the tracker's thread."""

    harmless = True

    def __init__(self, config: Any, run_dir: Path, step: int) -> None:
        self.config, self.run_dir, self.step = config, run_dir, step
        self.status = "preempted"
        self.records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.opened, self.warned = threading.Event(), False
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Tracking":
        """Open the tracker, before a loader forks while the thread imports modules."""
        self.thread.start()
        if not self.opened.wait(LIMIT):
            self._warn(f"it did not open within {LIMIT:.0f} s; records wait for it")
        return self

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Hand over the record of a step, if it has one."""
        if record and self.thread.is_alive():
            self.records.put(dict(record))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with contextlib.suppress(UserError):
            if kind or read_json(self.run_dir / "status.json").get("status") == "finished":
                self.status = "failed" if kind else "finished"
        self.records.put(None)
        self.thread.join(LIMIT)  # one that opens late gets all records now
        if self.thread.is_alive():
            self._warn(f"it did not close within {LIMIT:.0f} s")

    def _work(self) -> None:
        tracker = self._attempt(Tracker, self.config, self.run_dir, self.step)
        self.opened.set()
        if not tracker:
            return
        earlier = read_records(self.run_dir, self.step)  # by the starts before
        for record in itertools.chain(earlier, iter(self.records.get, None)):
            if (step := record["step"]) > tracker.logged:
                for path in samples_of(self.run_dir, step):
                    self._attempt(tracker.sample, path, step)
                self._attempt(tracker.scalars, step, scalars(record), record["time"])
        self._attempt(tracker.close, self.status)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BaseException as error:  # a tracker may even call sys.exit
            self._warn(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")

    def _warn(self, problem: str) -> None:
        """Warn of the first problem; the others are in the log file only."""
        level, extra = (logging.INFO, ONLY_IN_FILES) if self.warned else (logging.WARNING, None)
        self.warned = True
        log.log(level, "tracker error, training continues: %s", problem, extra=extra)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite figures of a record by tag: train/loss, validation/loss, perf/step_seconds."""
    figures = {n: v for n in record.keys() - {"step", "time"} for v in finite(record[n])}
    tags = {n: f"{'perf' if PERFORMANCE.fullmatch(n) else 'train'}/{n}" for n in figures}
    return {re.sub("^train/validation_", "validation/", tags[n]): figures[n] for n in figures}


TRACKERS = (Tracking,)
