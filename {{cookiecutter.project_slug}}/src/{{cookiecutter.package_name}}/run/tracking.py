"""A run's log handed on to an experiment tracker, which never holds training up nor stops it.

Only one thread, a daemon, ever calls the tracker. What goes wrong there is one warning, and then
the run goes on untracked; its next start hands over what the tracker has missed.
"""

import itertools
import json
import logging
import math
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import UserError
from ..settings import to_json
from .directory import RunDirectory
from .tracker import Tracker

log = logging.getLogger(__name__)
PATIENCE = 20.0  # seconds to wait for a tracker to open, and to close


class Tracking:
    """The tracker of a run at `step`; called after each step, as an observer is.

    `status` is how the run stands, if it is not running, and `settings` what it was started with.
    """

    def __init__(
        self,
        config: Any,
        run_dir: Path,
        step: int,
        status: str = "running",
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.run_dir, self.step, self.status = config, run_dir, step, status
        self.settings = settings or to_json(config)
        self.items: queue.SimpleQueue[dict[str, Any] | Path | str] = queue.SimpleQueue()
        self.opened, self.off = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._work, args=(step,), daemon=True)

    def __enter__(self) -> "Tracking":
        """Open the tracker: before the first step, lest a loader's fork finds imports half done."""
        self.thread.start()
        if not self.opened.wait(PATIENCE):
            self._give_up(f"it did not open within {PATIENCE:.0f} s")
        return self

    def __call__(self, state: Any, record: dict[str, Any] | None) -> None:
        """Hand over the log line of a step, if it has one."""
        self.step = state.step
        if record and not self.off.is_set():
            self.items.put(dict(record))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the tracker, saying how the run ended."""
        status = self.status
        if status == "running":
            done = self.step >= self.config.train.steps
            status = "failed" if kind else "finished" if done else "preempted"
        self.items.put(status)
        if not self.off.is_set():
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                self._give_up(f"it did not close within {PATIENCE:.0f} s")

    def _work(self, step: int) -> None:
        try:
            tracker = Tracker(self.config.tracker, self.run_dir, self.settings, step, self.status)
            self.opened.set()
            logged = tracker.logged
            for item in itertools.chain(lines(self.run_dir, step), iter(self.items.get, None)):
                if self.off.is_set():
                    return
                if isinstance(item, str):
                    tracker.close(item)
                    return
                if isinstance(item, Path):
                    tracker.file(item)
                elif item["step"] > logged:
                    tracker.scalars(item["step"], scalars(item), item["time"])
        except BaseException as error:  # a tracker may even call sys.exit
            self._give_up(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        finally:
            self.opened.set()

    def _give_up(self, problem: str) -> None:
        if not self.off.is_set():
            self.off.set()
            log.warning("the tracker is left out from here on, training is not: %s", problem)


def lines(run_dir: Path, step: int) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl up to a step: of this run's earlier starts."""
    path = run_dir / "metrics.jsonl"
    if step and path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if not line.endswith("\n") or (record := json.loads(line))["step"] > step:
                    return  # what is being written now
                yield record


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The figures of a log line, but for those that are not finite."""
    named = {name: value for name, value in record.items() if name not in ("step", "time")}
    return {name: v for name, v in named.items() if v is not None and math.isfinite(v)}


def log_report(run_dir: Path, config: Any, path: Path) -> None:
    """Hand a file to the tracker's run of a run directory that has trained and is not at it."""
    if not config.track:
        return
    try:
        with RunDirectory(run_dir, Group(), keep_logs=False):
            settings, found = (
                json.loads((run_dir / name).read_text("utf-8"))
                for name in ("config.json", "status.json")
            )
            step = max((record["step"] for record in lines(run_dir, 2**63)), default=0)
            # One that is said to be running, though nobody holds its directory, was killed.
            status = "failed" if found["status"] == "running" else found["status"]
            with Tracking(config, run_dir, step, status, settings) as tracking:
                tracking.items.put(path)
    except UserError as error:
        log.warning("the tracker did not get %s: %s", path.name, error)
