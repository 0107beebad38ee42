"""Stops, hangs and odd numbers: a bounded part, and breakages of each promise found out."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.stress import jobs, stops, stops_bad_steps, stops_hangs
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


def test_a_hang_that_is_not_named_is_noticed(tmp_path: Path) -> None:
    reason = "no step was finished for 9 s: rank 1 gave no sign of life"
    right = {"rank": 1, "seconds": 20.0, "code": 1, "reason": reason, "output": f"error: {reason}"}
    assert stops_hangs.judge(**right) is None
    other = {"rank": 0, "seconds": None, "code": 0, "reason": "InductorError", "output": ""}
    for name, value in other.items():
        assert stops_hangs.judge(**right | {name: value}), name
