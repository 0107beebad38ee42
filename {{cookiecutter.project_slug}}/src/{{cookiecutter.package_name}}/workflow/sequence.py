"""All stages in their order: each in a process of its own, so that none disturbs the next."""

import contextlib
import signal
import subprocess
import sys
import time

from ..config import Config
from ..errors import UserError, leave
from . import STAGES
from .gates import PACKAGE, command, is_current, read_stage, stage_file
from .report import publish_report

Row = tuple[str, str, float]  # stage, status, seconds


def run_all(config: Config, words: list[str]) -> int:
    """Run the stages with the options `words`; 0 if no gate failed, 1 otherwise.

    What was measured with the same settings and code is not measured again, so the same command
    goes on where it stopped. A failed gate ends it unless `workflow.go_on`. Writes the report.
    """
    signal.signal(signal.SIGTERM, leave)
    rows: list[Row] = []
    for place, name in enumerate(STAGES, 1):
        print(f"\n[{place}/{len(STAGES)}] {name}: {STAGES[name]}", flush=True)
        started = time.perf_counter()
        status = measured_before(config, name) or measured_now(config, name, words)
        rows.append((name, status, time.perf_counter() - started))
        if status not in ("pass", "not_measured") and not config.workflow.go_on:
            break
    print("\n" + "\n".join(summary(rows)), flush=True)
    with contextlib.suppress(UserError):  # a stage that broke down may have left nothing
        print(f"report: {publish_report(config.directory)}")
    failed = [name for name, status, _ in rows if status not in ("pass", "not_measured")]
    if failed and not config.workflow.go_on:
        print(
            f"stopped at {failed[0]}: mend it and type the same again, which goes on from there "
            "(--workflow.go-on does not stop)"
        )
    return int(bool(failed))


def measured_before(config: Config, name: str) -> str | None:
    """The status of a stage that need not be measured again."""
    try:
        content = read_stage(config.directory, name)
    except UserError as error:
        print(f"{str(error).partition(': measure again')[0]}: measured anew")
        return None
    if not content or config.workflow.again or content["status"] == "fail":
        return None
    if not is_current(content, config):
        print("measured before, with other settings, code or torch, or elsewhere: once more")
        return None
    status = content["status"]
    words = status.replace("_", " ")
    print(f"{words}, measured {content['measured_at']} (--workflow.again measures anew)")
    return status


def measured_now(config: Config, name: str, words: list[str]) -> str:
    """The status of a stage, run in a process of its own; "broken" when it ended otherwise."""
    path = stage_file(config.directory, name)
    before = path.stat().st_mtime_ns if path.exists() else None
    with subprocess.Popen([sys.executable, "-m", PACKAGE, name, *words]) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            print(f"\nstopped in {name}: nothing of it was kept; the same command goes on there")
            raise
    if code in (0, 1) and path.exists() and path.stat().st_mtime_ns != before:
        return read_stage(config.directory, name)["status"]
    what = "was refused, as said above" if code == 2 else f"broke down (exit code {code})"
    print(f"{name} {what}; by itself: {command(name, config.directory)}")
    return "broken"


def summary(rows: list[Row]) -> list[str]:
    """A line for each stage."""
    done = {name: (status, seconds) for name, status, seconds in rows}
    lines = []
    for name in STAGES:
        status, seconds = done.get(name, ("not run", 0.0))
        lines.append(f"{name:<12}{status.replace('_', ' '):<14}{seconds:6.1f} s")
    return lines
