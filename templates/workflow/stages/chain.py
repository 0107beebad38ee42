"""Run the stages in order: what each recommends is handed to the next, and all is measured at last.

A recommendation counts as long as its stage's gate has not failed and nothing that it was measured
with has changed. `python -m` this module FOLDER reads the settings FOLDER/given.json and
FOLDER/recommended.json and writes FOLDER/seconds.json: seconds per step of both, interleaved.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ..checkpoint.storage import on_disk
from ..config import from_json, override, preset, read_toml
from ..distributed import join
from ..errors import RankError, UserError, command_for, printable
from ..files import flatten, naming, read_json, replace_file, to_json, write_json
from ..train import setup
from . import STAGES
from .interleaved import TOO_NOISY, Interval, speedup_of, time_interleaved, with_loader
from .processes import leave, plain_environment, run_task
from .stage import PACKAGE, STATUSES, Stage, StageConfig, origin, stage_file

RECOMMENDED = "recommended"  # workflow/recommended.json and .toml
FAILED = ("fail", "crashed")
# Settings that change no measurement.
WITHOUT_EFFECT = {"name", "run_dir", "fresh", "init_from", "init_strict", "track", "tracker"}
WITHOUT_EFFECT |= {"workflow.keep_going", "workflow.force", "workflow.expect"}
NOT_TRAINED = {"workflow", "fresh", "name", "run_dir"}  # settings that recommended.toml leaves out
TIMEOUT = 1800.0  # seconds
FORM = dict.fromkeys(("figures", "settings", "machine", "versions"), dict)
FORM |= dict.fromkeys(("stage", "code", "measured_at"), str) | {"checks": list, "advice": list}


class Recommendation(NamedTuple):
    """A setting, and how many times as fast it made the steps, where that was measured."""

    stage: str
    setting: str
    value: Any
    factor: Interval | None

    def __str__(self) -> str:
        """As in --compile.mode blocks (compile: 1.25 (1.21 to 1.3) times as fast)."""
        times = f": {self.factor} times as fast" if self.factor else ""
        return f"{flag(self.setting)} {self.value} ({self.stage}{times})"


def run_stages(
    given: StageConfig, arguments: list[str], publish_report: Callable[[Path], Path]
) -> int:
    """Run each stage with these arguments in a process of its own; 0 if no gate failed, else 1.

    A stage measured before with the same settings and code is not run again, so the same command
    continues an interrupted workflow. The first failed gate ends it, unless
    `--workflow.keep-going`. At the end it writes the report.
    """
    signal.signal(signal.SIGTERM, leave)
    config, typed = on_disk(given), typed_settings(arguments)
    results: dict[str, tuple[str, float]] = dict.fromkeys(STAGES, ("not_run", 0.0))
    for number, (name, about) in enumerate(STAGES.items(), 1):
        print(f"\n[{number}/{len(STAGES)}] {name}: {about}", flush=True)
        started = time.perf_counter()
        status = reusable_status(with_recommended(config, name, typed)[0], name)
        status = status or run_stage(config, name, arguments)
        results[name] = status, time.perf_counter() - started
        if status in FAILED and not config.workflow.keep_going:
            remove_recommended(config.directory)
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


def run_stage(config: StageConfig, name: str, arguments: list[str]) -> str:
    """The status of a stage run in a process of its own; "crashed" if it wrote no result."""
    path = stage_file(config.directory, name)
    before = path.stat().st_mtime_ns if path.exists() else None
    command = [sys.executable, "-u", "-m", PACKAGE, name, *arguments]
    # In this process group: Ctrl-C reaches it, and it ends what it has started.
    process = subprocess.Popen(command, env=plain_environment())
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        print(f"\nstopped in {name}: the same command runs it again from its start", flush=True)
        process.wait()
        raise
    written = code in (0, 1) and path.exists() and path.stat().st_mtime_ns != before
    if written and (content := read_stage(config.directory, name)):
        return content["status"]
    problem = "refused its input (see above)" if code == 2 else f"crashed (exit code {code})"
    alone = shlex.join(["python", "-m", PACKAGE, name, *arguments])
    print(f"{name} {problem}; to run it alone: {alone}")
    return "crashed"


def reusable_status(config: StageConfig, name: str) -> str | None:
    """The status of a stage that need not be measured again, else None."""
    try:
        content = read_stage(config.directory, name)
    except UserError:
        print(f"measuring again: {stage_file(config.directory, name)} is damaged")
        return None
    if not content or config.workflow.repeats(name) or content["status"] == "fail":
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


def read_stage(run_dir: Path, name: str) -> dict[str, Any] | None:
    """What a stage measured, None if it has not run; UserError for a damaged file."""
    path = stage_file(run_dir, name)
    try:
        return result_in(path, name) if path.exists() else None
    except UserError as error:
        again = command_for(name, run_dir)
        raise UserError(f"{path} is damaged ({error}): measure again with `{again}`") from None


def result_in(path: Path, name: str = "") -> dict[str, Any]:
    """What a stage, or the one of this name, measured; UserError for any other file."""
    content = read_json(path)
    whole = all(isinstance(content.get(key), kind) for key, kind in FORM.items())
    if not whole or content.get("status") not in STATUSES or name not in ("", content["stage"]):
        raise UserError(f"{path} is not a result of {name or 'a stage'}")
    return content


def flag(setting: str) -> str:
    """The option of a setting."""
    return f"--{setting.replace('_', '-')}"


def recommend(stage: Stage, setting: str, value: Any, factor: Interval | None = None) -> None:
    """Hand a setting on to the stages after this one."""
    recommended = stage.figures.setdefault("recommended", {})
    recommended[setting] = {"value": value, "factor": factor and list(factor)}


def reject(stage: Stage, name: str, value: Any, why: str, factor: Interval | None = None) -> None:
    """Note what was tried and is not handed on, and why."""
    why = "faster, but not the best" if why == "faster" else why
    times = f", {factor} times as fast" if factor else ""
    text = f"{flag(name)} {value}: {why}{times}"
    stage.figures.setdefault("rejected", []).append(text)


def start_from_recommended(config: StageConfig, name: str, arguments: list[str]) -> StageConfig:
    """The settings of a stage with what the stages before it recommend, and say so."""
    if os.environ.get("WORLD_SIZE", "1") != "1":  # ranks could read different files
        return config
    config, taken = with_recommended(config, name, typed_settings(arguments))
    if taken:
        print(f"     going on from {', '.join(map(str, taken))}", flush=True)
    return config


def with_recommended(
    config: StageConfig, name: str, typed: set[str]
) -> tuple[StageConfig, list[Recommendation]]:
    """The settings with what the stages before `name` recommend, except for options typed."""
    taken: list[Recommendation] = []
    for earlier in itertools.takewhile(lambda stage: stage != name, STAGES):
        # A damaged file counts as if the stage had not run; who reads it next says so.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            content = read_stage(config.directory, earlier)
            if not content or content["status"] == "fail":
                continue
            if with_effect(content) != with_effect(origin(config)):
                continue
            new = [
                Recommendation(earlier, setting, each["value"], interval(each["factor"]))
                for setting, each in content["figures"].get("recommended", {}).items()
                if setting not in typed
            ]
            config = override(config, {each.setting: each.value for each in new})
            taken += new
    return config, taken


def interval(factor: Any) -> Interval | None:
    """An interval out of JSON; ValueError or TypeError for anything else."""
    return None if factor is None else Interval(*map(float, factor))


def typed_settings(arguments: list[str]) -> set[str]:
    """The settings that are named on a command line, or in a TOML file given by --config."""
    options = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    named = {option.replace("-", "_") for option in options}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    file = parser.parse_known_args(arguments)[0].config
    return named | (read_toml(file).keys() if file and file.suffix == ".toml" else set())


def remove_recommended(run_dir: Path) -> Path:
    """Remove what was recommended before; the path of the new recommended.toml."""
    path = stage_file(run_dir, RECOMMENDED)
    for each in (path, toml := path.with_suffix(".toml")):
        with naming(each):
            each.unlink(missing_ok=True)
    return toml


def measure_together(config: StageConfig, typed: set[str], with_store: StageConfig) -> str:
    """Measure what the stages recommend against the given settings; its status.

    Writes workflow/recommended.toml, unless it is slower, and recommended.json beside it; `config`
    is what the stages go by, without the object store that `with_store` may have.
    """
    final, taken = with_recommended(config, "", typed)
    given = with_effect(origin(config))[0]
    with contextlib.suppress(UserError):  # damaged: measured again
        before = read_stage(config.directory, RECOMMENDED)
        same = before and before["figures"].get("given") == given
        if same and (status := reusable_status(final, RECOMMENDED)):
            return status
    file, stage = remove_recommended(config.directory), Stage(RECOMMENDED, final)
    stage.figures |= {"given": given, "file": str(file), "settings": [str(each) for each in taken]}
    measured, passed = "no setting was found that is faster than yours", True
    if any(not each.setting.startswith("checkpoint.") for each in taken):
        try:
            speedup, verdict = time_both(config, final)
            stage.figures["factor"] = list(speedup)
            measured = f"{speedup} times as fast as your settings: {verdict}"
            passed = None if verdict == TOO_NOISY else verdict != "slower"
        except RankError as error:
            measured, passed = f"not measured: {error}", None
    wanted = "not slower than your settings"
    advice = "measure again with --workflow.force when nothing else runs on this machine"
    stage.check("together", passed, measured=measured, wanted=wanted, advice=advice)
    for each in taken:
        print(f"     {each}")
    if taken and passed is not False:
        settings = {each.setting: each.value for each in taken}
        write_toml(file, override(with_store, settings), taken)
        print(f"     to train with them: python -m {PACKAGE} train --config {file}")
    stage.close()
    return stage.status


def write_toml(path: Path, config: StageConfig, taken: list[Recommendation]) -> None:
    """What differs from the default preset, for `train --config`, and where it comes from."""
    usual = dict(flatten(to_json(preset("default", StageConfig))))
    sources = {each.setting: f"  # {each.stage}" for each in taken}
    lines = ["# What the workflow recommends, on top of --preset default."]
    for name, value in flatten(to_json(config)):
        if value != usual.get(name) and value is not None and name.split(".")[0] not in NOT_TRAINED:
            text = json.dumps(value, ensure_ascii=False)
            lines.append(f"{name} = {text}{sources.get(name, '')}")
    replace_file(path, "\n".join(lines) + "\n")


def time_both(given: StageConfig, recommended: StageConfig) -> tuple[Interval, str]:
    """How many times as fast steps with the recommended settings are, and a word for it."""
    print("     your settings and the recommended ones, interleaved ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="together-") as scratch:
        folder = Path(scratch)
        write_json(folder / "given.json", to_json(given))
        write_json(folder / f"{RECOMMENDED}.json", to_json(recommended))
        seconds = run_task("chain", folder, "seconds", seconds=TIMEOUT)
    if "error" in seconds:
        raise RankError(seconds["error"])
    return speedup_of(seconds["given"], seconds[RECOMMENDED])


def time_steps(folder: Path) -> dict[str, Any]:
    """Seconds per step with both settings, in interleaved windows, data loading included."""
    from torch._dynamo import config as dynamo  # slow to import

    files = {name: folder / f"{name}.json" for name in ("given", RECOMMENDED)}
    configs = {name: from_json(StageConfig(), file) for name, file in files.items()}
    world = join(configs["given"].parallel, configs["given"].device)
    workers = (max(1, config.train.loader_workers) for config in configs.values())
    try:
        # Else the second compiles for any size of batch, since the first has shown another.
        with patch.object(dynamo, "automatic_dynamic_shapes", False):
            ways = {name: with_loader(setup(config, world)) for name, config in configs.items()}
            for way in ways.values():
                way(2)  # compiles
            return time_interleaved(ways, multiple=math.lcm(*workers))
    except torch.OutOfMemoryError:
        return {"error": "both together do not fit into the memory"}


if __name__ == "__main__":
    folder, task = Path(sys.argv[1]), sys.argv[2]
    write_json(folder / f"{task}.json", time_steps(folder))
