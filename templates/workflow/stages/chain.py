"""Run the stages in order: what each recommends is handed to the next, and all is measured at last.

A recommendation counts as long as its stage's gate has not failed and nothing that it was measured
with has changed.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from ..checkpoint.storage import on_disk
from ..config import override, preset, read_toml
from ..distributed import join
from ..errors import UserError, command_for, printable
from ..files import flatten, read_json, replace_file, to_json
from ..train import setup
from . import STAGES
from .interleaved import TOO_NOISY, Interval, speedup_of, time_interleaved, with_loader
from .processes import leave, plain_environment
from .stage import PACKAGE, STATUSES, Stage, StageConfig, origin, stage_file

RECOMMENDED = "recommended"  # workflow/recommended.json and .toml
FAILED = ("fail", "crashed")
# Settings that change no measurement.
WITHOUT_EFFECT = {"name", "run_dir", "fresh", "init_from", "init_strict", "track", "tracker"}
WITHOUT_EFFECT |= {"workflow.keep_going", "workflow.force", "workflow.expect"}
NOT_TRAINED = {"workflow", "fresh", "name", "run_dir"}  # settings that recommended.toml leaves out
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
    results = dict.fromkeys(STAGES, "not_run")
    for number, (name, about) in enumerate(STAGES.items(), 1):
        print(f"\n[{number}/{len(STAGES)}] {name}: {about}", flush=True)
        status = reusable_status(with_recommended(config, name, typed)[0], name)
        results[name] = status or run_stage(config, name, arguments)
        if results[name] in FAILED and not config.workflow.keep_going:
            remove_recommended(config.directory)
            break
    else:
        print(f"\n{RECOMMENDED}: Measure all that the stages recommend, together.", flush=True)
        results[RECOMMENDED] = measure_together(given, typed)
    print()
    for name, status in results.items():
        print(f"{name:<12}{status.replace('_', ' ')}", flush=True)
    with contextlib.suppress(UserError):  # a stage that crashed may have left nothing
        print(f"report: {publish_report(config.directory)}")
    failed = [name for name, status in results.items() if status in FAILED]
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
    if config.workflow.repeats(name) or not stage_file(config.directory, name).exists():
        return None
    if content := current_result(config, name):
        status, when = content["status"], printable(content["measured_at"])
        print(f"{status.replace('_', ' ')}, measured {when} (--workflow.force measures again)")
        return status
    print("measuring again: it failed or is damaged, or the settings, code or machine have changed")
    return None


def current_result(config: StageConfig, name: str) -> dict[str, Any] | None:
    """What a stage measured, unless it failed or what it was measured with has changed since."""
    with contextlib.suppress(UserError):  # a damaged file counts as if the stage had not run
        content = read_stage(config.directory, name)
        if content and content["status"] != "fail":
            return content if with_effect(content) == with_effect(origin(config)) else None
    return None


def with_effect(origin: dict[str, Any]) -> dict[str, Any]:
    """What can change a measurement: settings, code, torch and the kind of machine."""
    named = flatten(origin["settings"])
    return {
        "settings": {n: v for n, v in named if not WITHOUT_EFFECT & {n, n.partition(".")[0]}},
        "code": origin["code"],
        "torch": origin["versions"].get("torch"),
        "machine": [origin["machine"].get(key) for key in ("device", "gpus", "cpu")],
    }


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
        content = current_result(config, earlier) or {"figures": {}}
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # damaged
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
        each.unlink(missing_ok=True)
    return toml


def measure_together(given: StageConfig, typed: set[str]) -> str:
    """Measure what the stages recommend against the given settings; its status.

    Writes workflow/recommended.toml, unless it is slower, and recommended.json beside it.
    """
    config = on_disk(given)
    final, taken = with_recommended(config, "", typed)
    settings = with_effect(origin(config))["settings"]
    before = current_result(final, RECOMMENDED)
    same = before and before["figures"].get("given") == settings
    if same and (status := reusable_status(final, RECOMMENDED)):
        return status
    file, stage = remove_recommended(config.directory), Stage(RECOMMENDED, final)
    words = [str(each) for each in taken]
    stage.figures |= {"given": settings, "file": str(file), "settings": words}
    measured, passed = "no setting was found that is faster than yours", True
    if any(not each.setting.startswith("checkpoint.") for each in taken):
        print("     your settings and the recommended ones, interleaved ...", flush=True)
        try:
            seconds = time_steps({"given": config, RECOMMENDED: final})
            speedup, verdict = speedup_of(seconds["given"], seconds[RECOMMENDED])
            stage.figures["factor"] = list(speedup)
            measured = f"{speedup} times as fast as your settings: {verdict}"
            passed = None if verdict == TOO_NOISY else verdict != "slower"
        except Exception as error:  # as when both do not fit into the memory
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            measured, passed = f"not measured: {reason}", None
    wanted = "not slower than your settings"
    advice = "measure again with --workflow.force when nothing else runs on this machine"
    stage.check("together", passed, measured=measured, wanted=wanted, advice=advice)
    if taken and passed is not False:
        print("\n".join(f"     {each}" for each in words))
        write_toml(file, override(given, {each.setting: each.value for each in taken}), taken)
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


def time_steps(configs: dict[str, StageConfig]) -> dict[str, list[float]]:
    """Seconds per step with each of the settings, in interleaved windows, data loading included."""
    from torch._dynamo import config as dynamo  # slow to import

    first = next(iter(configs.values()))
    world = join(first.parallel, first.device)
    workers = (max(1, config.train.loader_workers) for config in configs.values())
    # Else the second compiles for any size of batch, since the first has shown another.
    with patch.object(dynamo, "automatic_dynamic_shapes", False):
        ways = {name: with_loader(setup(config, world)) for name, config in configs.items()}
        for way in ways.values():
            way(2)  # compiles
        return time_interleaved(ways, multiple=math.lcm(*workers))
