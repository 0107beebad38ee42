"""Logs a run to its experiment tracker, which neither holds training up nor ends it.

Only one thread, a daemon, calls the tracker. An error there is one warning, and the run goes on
untracked; its next start logs the lines that the tracker has missed.
"""

import contextlib
import itertools
import logging
import queue
import re
import threading
from pathlib import Path
from typing import Any

from ..distributed import Group
from ..errors import UserError
from ..files import read_json, to_json
from .directory import RunDirectory
from .journal import finite, read_records
from .samples import samples_of
from .tracker_adapter import Tracker, TrackerConfig

__all__ = ["TrackerConfig", "log_report", "tracking"]
log = logging.getLogger(__name__)
OPENING = 20.0  # seconds to wait for a tracker to open, and to close


def tracking(config: Any, run_dir: Path, step: int) -> "tuple[Tracking, ...]":
    """The callbacks that log to the tracker, from `step` on."""
    return (Tracking(config, run_dir, step),)


class Tracking:
    """A callback: hands each record to the tracker.

    `status` is the run's, if it is not running now, and `settings` are those it was started with.
    """

    harmless = True

    def __init__(
        self, config: Any, run_dir: Path, step: int, status: str = "running", settings: Any = None
    ) -> None:
        self.config, self.run_dir, self.step, self.status = config, run_dir, step, status
        self.settings = settings or to_json(config)
        self.items: queue.SimpleQueue[dict[str, Any] | Path | str] = queue.SimpleQueue()
        self.opened, self.off = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Tracking":
        """Open the tracker, before a loader forks while the thread imports modules."""
        self.thread.start()
        if not self.opened.wait(OPENING):
            self._give_up(f"it did not open within {OPENING:.0f} s")
        return self

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Hand over the record of a step, if it has one."""
        if record and not self.off.is_set():
            self.items.put(dict(record))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        status = self.status
        if status == "running":
            status = "failed" if kind else "preempted"
            with contextlib.suppress(UserError):
                if not kind and read_json(self.run_dir / "status.json").get("status") == "finished":
                    status = "finished"
        self.items.put(status)
        if not self.off.is_set():
            self.thread.join(OPENING)
            if self.thread.is_alive():
                self._give_up(f"it did not close within {OPENING:.0f} s")

    def _work(self) -> None:
        step = self.step
        try:
            tracker = Tracker(self.config.tracker, self.run_dir, self.settings, step, self.status)
            self.opened.set()
            logged = tracker.logged
            before = read_records(self.run_dir, step) if step else ()  # by earlier starts
            for item in itertools.chain(before, iter(self.items.get, None)):
                if self.off.is_set():
                    return
                if isinstance(item, str):
                    tracker.close(item)
                    return
                if isinstance(item, Path):
                    tracker.file(item)
                elif item["step"] > logged:
                    for path in samples_of(self.run_dir, item["step"]):
                        tracker.sample(path, item["step"])
                    tracker.scalars(item["step"], scalars(item), item["time"])
        except BaseException as error:  # a tracker may even call sys.exit
            self._give_up(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        finally:
            self.opened.set()

    def _give_up(self, problem: str) -> None:
        if not self.off.is_set():
            self.off.set()
            log.warning("the tracker is left out from here on, training is not: %s", problem)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite figures of a record by tag, such as train/loss and validation/loss."""
    named = {name: value for name, value in record.items() if name not in ("step", "time")}
    figures = {name: v for name, value in named.items() for v in finite(value)}
    return {re.sub("^train/validation_", "validation/", f"train/{n}"): figures[n] for n in figures}


def log_report(run_dir: Path, config: Any, path: Path) -> None:
    """Give a run's report to its tracker, while the run itself is not training."""
    if not config.track:
        return
    if uri := getattr(config.tracker, "uri", None):  # not of this command: whoever made the run
        if not uri.startswith(("http://", "https://")) or not uri.isprintable():
            log.warning("the tracker did not get %s: it is opened by train alone", path.name)
            return
        log.info("%s goes to %s, as config.json says", path.name, uri)
    try:
        with RunDirectory(run_dir, Group()):
            names = ("config.json", "status.json")
            settings, found = (read_json(run_dir / name) for name in names)
            step = max((record["step"] for record in read_records(run_dir)), default=0)
            # A run whose status is "running" though nobody holds its directory was killed.
            status = "failed" if found["status"] == "running" else found["status"]
            with Tracking(config, run_dir, step, status, settings) as callback:
                callback.items.put(path)
    except UserError as error:
        log.warning("the tracker did not get %s: %s", path.name, error)
