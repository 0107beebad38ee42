"""Stops, hangs and odd numbers: a bounded part, and breakages of each promise found out."""

import dataclasses
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.stress import jobs, stops, stops_bad_steps, stops_hangs, stops_outside
from tests.stress.common import Findings


def test_stops_lose_nothing_and_so_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = Findings(True, tmp_path)
    stops.attempt(findings)
    for tally in findings.tallies:
        assert tally.tried and not tally.violations, tally.promise

    single = jobs.Render(tmp_path / "broken", "stops_broken", parallelism="single")
    package = single.package

    def broken() -> set[str]:
        found = Findings(True, tmp_path)
        stops_bad_steps.attempt(found, single)
        return {tally.promise for tally in found.tallies if tally.violations}

    with monkeypatch.context() as patch:
        patch.setattr(f"{package}.checkpoint.writer.refuse_nan", lambda *tensors: None)
        patch.setattr(f"{package}.run.bad_steps.RunningBuffers.put_back", lambda *step: None)
        patch.setattr(f"{package}.run.bad_steps.BadSteps._search", lambda *of: [0, 1])
        odd = {stops_bad_steps.PUBLISHED, stops_bad_steps.CLEAN, stops_bad_steps.NAMED}
        assert broken() == odd

    found = Findings(True, tmp_path)
    case = ("validation", "everyone", signal.SIGTERM, 1)
    stops.preempt(found, single, 0, [case], deaf=True)
    with monkeypatch.context() as patch:
        patch.setattr(f"{package}.run.directory.fcntl.lockf", lambda *lock: None)
        stops.two_runs(found, single)
    with socket.create_server(("0.0.0.0", 0)):
        jobs.who_listens(found, [os.getpid()], "a socket of ours")
    noticed = {tally.promise for tally in found.tallies if tally.violations}
    assert noticed == {stops.KEPT, stops.REFUSED, stops.FREE, jobs.LOOPBACK}

    with single.module("compile").Compiling():
        assert _hears_stop_signals()
        handler = single.module("compile").torch._dynamo.callback_handler
        with handler.install_callbacks(None, "0/0"):
            assert not _hears_stop_signals()
        assert _hears_stop_signals()


def _hears_stop_signals() -> bool:
    with subprocess.Popen(["sleep", "60"]) as process:
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
        process.kill()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    return not blocked >> signal.SIGTERM - 1 & 1


@dataclasses.dataclass
class Ended:
    """A job that has ended."""

    output: str = ""
    returncode: int = 1
    left: tuple[int, ...] = ()
    count: int = 0

    @property
    def process(self) -> "Ended":
        return self

    def survivors(self) -> tuple[int, ...]:
        """Those of its processes that live on."""
        return self.left


def test_a_worker_that_is_handled_otherwise_is_noticed() -> None:
    judged, told = stops_outside.judged, "error: a loader worker cannot send a batch"
    assert judged(Ended(), 25.0, "hangs", "preempted") is None
    assert judged(Ended(told), 5.0, "cannot be sent", "failed") is None
    assert judged(Ended(), None, "hangs", "running") == "still there"
    assert judged(Ended(left=(7,)), 25.0, "hangs", "preempted") == "1 processes live on"
    assert judged(Ended(returncode=0), 25.0, "hangs", "preempted") == "told as a success"
    assert judged(Ended(), 25.0, "hangs", "failed") == "status failed"
    assert judged(Ended(), 5.0, "dies", "failed") == "not told"


def test_a_hang_that_is_not_named_is_noticed(tmp_path: Path) -> None:
    reason = "no step finished for 9 s: rank 1 did not respond"
    right = {"rank": 1, "seconds": 20.0, "code": 1, "reason": reason, "output": f"error: {reason}"}
    assert stops_hangs.judge(**right) is None
    other = {"rank": 0, "seconds": None, "code": 0, "reason": "InductorError", "output": ""}
    for name, value in other.items():
        assert stops_hangs.judge(**right | {name: value}), name
