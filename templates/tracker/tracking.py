"""Log a run to its experiment tracker; a slow or failing tracker does not disturb training.

Only a daemon thread calls the tracker. The tracker's first error logs a warning, and later records
are still sent. The next start of the run sends all records that the tracker does not have yet.
"""

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import read_json
from .journal import finite, read_records, validation_figures
from .logs import ONLY_IN_FILES
from .samples import samples_of
from .tracker_adapter import Tracker, TrackerConfig

if TYPE_CHECKING:
    from ..config import Config
    from ..train import State

__all__ = ["TRACKERS", "TrackerConfig"]
log = logging.getLogger(__name__)
# Metrics of speed and memory, such as step_seconds; all others are metrics of the model.
PERFORMANCE = re.compile("[a-z_]+_(seconds|per_second|bytes)|mfu")
# The longest wait in seconds for the tracker to open and, at the end, for it to close.
LIMIT = 20.0


class Tracking:
    """Callback that passes each record to the tracker's thread."""

    # After an error in this callback, training continues without it (callback_runner.py).
    harmless = True

    def __init__(self, config: "Config", run_dir: Path, step: int) -> None:
        self.config = config
        self.run_dir = run_dir
        # The step from which this start of the run trains.
        self.step = step
        # The status that the tracker gets at the end; `__exit__` changes it if the run has finished
        # or failed.
        self.status = "preempted"
        # The records that the thread has yet to log; None ends the thread.
        self.records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # Set once the tracker has opened, or has failed to.
        self.opened = threading.Event()
        self.warned = False
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Tracking":
        """Start the thread, and wait until it has opened the tracker, at most `LIMIT` seconds.

        A data loader must not fork this process while the thread imports the tracker's modules.
        """
        self.thread.start()
        if not self.opened.wait(LIMIT):
            self._warn(f"it did not open within {LIMIT:.0f} s; records are queued")
        return self

    def after_validation(self, state: "State", figures: dict[str, float]) -> None:
        """Queue the metrics of a validation that this start repeats before its first step.

        An earlier start did not complete this validation, usually because of a stop signal. It sent
        the record of the step without these metrics. Later validations need no record of their own:
        `after_step` queues the record of the step, which has their metrics.
        """
        if state.step == self.step and self.thread.is_alive():
            metrics = validation_figures(figures)
            self.records.put({"step": state.step, "time": time.time(), **metrics})

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Queue the record of a step, if it has one."""
        if record is not None and self.thread.is_alive():
            self.records.put(dict(record))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # KeyboardInterrupt is no failure: it means Ctrl-C, or that the loader workers did not
        # answer after a stop signal.
        was_stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        if kind is not None and not was_stopped:
            self.status = "failed"
        elif self._has_finished():
            self.status = "finished"
        self.records.put(None)
        # Give the thread time to log the queued records, of which there are many if the tracker
        # opened late.
        self.thread.join(LIMIT)
        if self.thread.is_alive():
            self._warn(f"it did not close within {LIMIT:.0f} s")

    def _has_finished(self) -> bool:
        with contextlib.suppress(UserError):
            return read_json(self.run_dir / "status.json").get("status") == "finished"
        return False

    def _work(self) -> None:
        """Log the records of earlier starts, then those of this one; runs in the thread."""
        tracker = self._attempt(Tracker, self.config, self.run_dir, self.step)
        self.opened.set()
        if tracker is None:
            return
        for record in read_records(self.run_dir, self.step):
            if record["step"] > tracker.logged:
                self._log(tracker, record)
        record = self.records.get()
        while record is not None:
            # The tracker may already have steps that this start repeats: do not send them again.
            # But send a record of `self.step`, which has the metrics from `after_validation`.
            if record["step"] > tracker.logged or record["step"] == self.step:
                self._log(tracker, record)
            record = self.records.get()
        self._attempt(tracker.close, self.status)

    def _log(self, tracker: Tracker, record: dict[str, Any]) -> None:
        """Log a record and the samples of its step."""
        step = record["step"]
        # Log samples first: a tracker may accept nothing more for a step after its metrics.
        for path in samples_of(self.run_dir, step):
            self._attempt(tracker.sample, path, step)
        self._attempt(tracker.scalars, step, scalars(record), record.get("time", time.time()))

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the tracker; return None after an error, which is logged."""
        try:
            return call(*arguments)
        except BaseException as error:
            # Catch BaseException, since a tracker may even call sys.exit.
            first_line = str(error).partition("\n")[0]
            self._warn(f"{type(error).__name__}: {first_line}")

    def _warn(self, problem: str) -> None:
        """Warn of the first problem; write later ones only to the log file."""
        text = "tracker error, training continues: %s"
        if self.warned:
            log.info(text, problem, extra=ONLY_IN_FILES)
        else:
            log.warning(text, problem)
        self.warned = True


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a record by tag, such as train/loss or perf/step_seconds."""
    tagged: dict[str, float] = {}
    for name, value in record.items():
        if name not in ("step", "time") and finite(value):
            tagged[_tag(name)] = float(value)
    return tagged


def _tag(name: str) -> str:
    """Return a metric's name in the tracker, such as train/loss; trackers group by the prefix."""
    if PERFORMANCE.fullmatch(name):
        return f"perf/{name}"
    if name.startswith("validation_"):
        return f"validation/{name.removeprefix('validation_')}"
    return f"train/{name}"


TRACKERS = (Tracking,)
