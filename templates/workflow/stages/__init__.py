"""The engineering workflow as commands: stages that measure the project's loop and judge it.

Importing this imports no torch, so that `--help` stays quick.
"""

import contextlib
import importlib
import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from ..files import flatten

ABOUT = {
    "baseline": "Measure one eager process: determinism, learning, throughput, waiting for data.",
    "compile": "Try torch.compile: graph breaks, recompiles, same numbers, speedup, warm caches.",
    "profile": "Trace some steps for Perfetto: where a step's time goes, and what to try next.",
    "scale": "Run on 1 to n processes: same losses, efficiency, memory per rank, DDP or FSDP.",
    "checkpoint": "Drill the recovery: restore, reshard, kill, damage; say how often to save.",
}
MODULES = {name: name for name in ABOUT} | {"baseline": "tuning", "checkpoint": "recovery"}
HERE = Path(__file__).parent
STAGES = {name: ABOUT[name] for name, file in MODULES.items() if (HERE / f"{file}.py").exists()}
"""The stages of this project, in the order in which they build on each other."""
COMMANDS = STAGES | {
    "workflow": "Run all stages in order, up to the first failed gate; then write the report.",
    "compare": "Tell what is better or worse in one run, or result of a stage, than in another.",
    "report": "Write report.html: loss, throughput, scaling, memory, checkpoints, checks, advice.",
}
FAILED = ("fail", "crashed")
# Settings that change no measurement.
WITHOUT_EFFECT = {"name", "run_dir", "fresh", "init_from", "init_strict", "track", "tracker"}
WITHOUT_EFFECT |= {"workflow.keep_going", "workflow.force", "workflow.expect"}


@dataclass(frozen=True)
class WorkflowConfig:
    """How far the stages go."""

    ranks: int = 0
    """The most processes to start (0: one per GPU of this machine, on a CPU 2)."""
    hours_between_failures: float = 24.0
    """Mean time between failures of the whole job, preemptions included; the advised interval
    between checkpoints follows from it."""
    keep_going: bool = False
    """Continue after a gate that failed."""
    force: bool = False
    """Measure again what was already measured with these settings and this code."""
    expect: Path | None = None
    """TOML with losses and throughput that the baseline has to reach; README has the form."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if self.ranks < 0 or not self.hours_between_failures > 0:
            raise UserError("workflow: ranks must be >= 0 and hours-between-failures > 0")


def run_command(name: str, arguments: list[str], parse: Callable[[type], Any]) -> int:
    """Run one of `COMMANDS`; `parse(kind)` reads settings of that kind from the arguments."""
    from ..checkpoint.storage import on_disk
    from ..config import RunLocation
    from .stage import StageConfig

    if name == "report":
        from .report import publish_report

        print(publish_report(parse(RunLocation).directory))
        return 0
    if name == "compare":
        from .compare import CompareConfig, compare

        return compare(parse(CompareConfig))
    from .chain import go_on, typed_settings
    from .compare import keep_result

    given = parse(StageConfig)
    config = on_disk(given)
    if name == "workflow":
        return run_stages(config, arguments, given)
    if os.environ.get("WORLD_SIZE", "1") == "1":  # ranks could read different files
        config, taken = go_on(config, name, typed_settings(arguments))
        if taken:
            print(f"     going on from {', '.join(map(str, taken))}", flush=True)
        keep_result(config.directory, name)
    return importlib.import_module(f"{__name__}.{MODULES[name]}").measure(config)


def run_stages(config: Any, arguments: list[str], given: Any) -> int:
    """Run each stage with these arguments in a process of its own; 0 if no gate failed, else 1.

    A stage measured before with the same settings and code is not run again, so the same command
    continues an interrupted workflow. The first failed gate ends it, unless
    `--workflow.keep-going`. At the end it writes the report.
    """
    from .chain import RECOMMENDED, forget, go_on, measure_together, typed_settings
    from .processes import leave
    from .report import publish_report

    typed = typed_settings(arguments)
    signal.signal(signal.SIGTERM, leave)
    results: dict[str, tuple[str, float]] = dict.fromkeys(STAGES, ("not_run", 0.0))
    for number, (name, about) in enumerate(STAGES.items(), 1):
        print(f"\n[{number}/{len(STAGES)}] {name}: {about}", flush=True)
        started = time.perf_counter()
        going_on, _ = go_on(config, name, typed)
        status = earlier_status(going_on, name) or run_stage(config, name, arguments)
        results[name] = status, time.perf_counter() - started
        if status in FAILED and not config.workflow.keep_going:
            forget(config.directory)
            break
    else:
        print(f"\n{RECOMMENDED}: Measure all that the stages recommend, together.", flush=True)
        started = time.perf_counter()
        status = measure_together(config, typed, given)
        results[RECOMMENDED] = status, time.perf_counter() - started
    print()
    for name, (status, seconds) in results.items():
        print(f"{name:<12}{status.replace('_', ' '):<14}{seconds:6.1f} s", flush=True)
    with contextlib.suppress(UserError):  # a stage that crashed may have left nothing
        print(f"report: {publish_report(config.directory)}")
    failed = [name for name, (status, _) in results.items() if status in FAILED]
    if failed and not config.workflow.keep_going:
        print(
            f"stopped at {failed[0]}: fix it and rerun the same command to continue "
            "(--workflow.keep-going continues after a failed gate)"
        )
    return int(bool(failed))


def earlier_status(config: Any, name: str) -> str | None:
    """The status of a stage that need not be measured again, else None."""
    from .chain import read_stage
    from .stage import origin, stage_file

    try:
        content = read_stage(config.directory, name)
    except UserError:
        print(f"measuring again: {stage_file(config.directory, name)} is damaged")
        return None
    held = name == "baseline" and config.workflow.expect
    if not content or config.workflow.force or content["status"] == "fail" or held:
        return None
    if with_effect(content) != with_effect(origin(config)):
        print("measuring again: the settings, the code, torch or the machine have changed")
        return None
    status, when = content["status"], printable(content["measured_at"])
    print(f"{status.replace('_', ' ')}, measured {when} (--workflow.force measures again)")
    return status


def with_effect(origin: dict[str, Any]) -> tuple[Any, ...]:
    """What can change a measurement: settings, code, torch and the kind of machine."""
    machine = [origin["machine"].get(key) for key in ("device", "gpus", "cpu")]
    settings = settings_with_effect(origin["settings"])
    return settings, origin["code"], origin["versions"].get("torch"), machine


def settings_with_effect(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that can change a measurement, by their dotted names."""
    named = flatten(settings)
    return {n: v for n, v in named if not WITHOUT_EFFECT & {n, n.partition(".")[0]}}


def run_stage(config: Any, name: str, arguments: list[str]) -> str:
    """The status of a stage run in a process of its own; "crashed" if it wrote no result."""
    from .chain import read_stage
    from .processes import start
    from .stage import PACKAGE, stage_file

    path = stage_file(config.directory, name)
    before = path.stat().st_mtime_ns if path.exists() else None
    process = start(PACKAGE, name, *arguments, piped=False)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        text = f"\nstopped in {name}, of which nothing is kept: the same command reruns it"
        print(text, flush=True)
        process.wait()
        raise
    written = code in (0, 1) and path.exists() and path.stat().st_mtime_ns != before
    if written and (content := read_stage(config.directory, name)):
        return content["status"]
    problem = "refused its input (see above)" if code == 2 else f"crashed (exit code {code})"
    alone = shlex.join(["python", "-m", PACKAGE, name, *arguments])
    print(f"{name} {problem}; to run it alone: {alone}")
    return "crashed"
