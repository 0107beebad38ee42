"""Run the stages in order; each uses the settings that earlier stages recommend.

If a stage does not fail, later stages get its recommendations as options on their command line.
They get those of `compile` even if one of its checks fails. At the end, steps with all recommended
settings are timed against steps with the user's settings. Unless the recommended settings are
slower, they are written to `recommended.toml`.
"""

import argparse
import contextlib
import json
import math
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.storage import on_disk
from ..config import override, preset, read_toml
from ..distributed import join
from ..errors import UserError, command_for, printable
from ..files import flatten, read_json, replace_file, to_json
from ..run.journal import FIGURES
from ..train import setup
from . import STAGES
from .interleaved import TOO_NOISY, Interval, speedup_of, time_interleaved, with_loader
from .processes import leave, plain_environment
from .stage import PACKAGE, STATUSES, Stage, StageConfig, lock_stage, origin, stage_file

# The stem of workflow/recommended.json and recommended.toml.
RECOMMENDED = "recommended"
FAILED = ("fail", "crashed")
# Settings that recommended.toml leaves out: `workflow` is a section for stages only, the next two
# are for a single start, and the printed command gives the run's name or directory.
LEFT_OUT_OF_TOML = {"workflow", "fresh", "reset_optimizer", "name", "run_dir"}
# Settings that do not affect measurements. The name of a section, such as `tracker`, stands for all
# settings of that section.
WITHOUT_EFFECT = {
    "workflow.force",
    "workflow.keep_going",
    "workflow.expect",
    "track",
    "tracker",
    "fresh",
    "reset_optimizer",
    "name",
    "run_dir",
}
# The keys that are read from a stage's JSON, and the types of their values.
RESULT_TYPES = {
    "stage": str,
    "status": str,
    "checks": list,
    "advice": list,
    "figures": dict,
    "settings": dict,
    "code": str,
    "machine": dict,
    "versions": dict,
    "measured_at": str,
}


@dataclass(frozen=True)
class Recommendation:
    """A value that a stage recommends for a setting, and the reason as text."""

    value: Any
    text: str


# Recommendations by the name of the setting.
Recommendations = dict[str, Recommendation]


def run_stages(given: StageConfig, arguments: list[str], measure_again: str = "") -> int:
    """Run each stage with these arguments in its own process; return 1 if a stage failed, else 0.

    A stage does not run if it already has a result with the same settings and code, unless it is
    the stage `measure_again`. So the same command continues an interrupted workflow. The first
    failed stage ends the workflow, unless `--workflow.keep-going` is given. A failed check of
    `compile` does not end it. Raises UserError if a workflow of this run is already running.
    """
    with lock_stage(on_disk(given).directory, "workflow"):
        return run_unlocked_stages(given, arguments, measure_again)


def run_unlocked_stages(given: StageConfig, arguments: list[str], measure_again: str) -> int:
    """Run the stages for `run_stages`, which has locked the workflow of this run."""
    # On SIGTERM, `leave` raises SystemExit, so that `run_stage` ends the process of its stage.
    signal.signal(signal.SIGTERM, leave)
    config = on_disk(given)
    # Settings that the user has set; recommendations do not change them.
    typed = typed_settings(arguments)
    # The recommendations of the stages so far, which later stages use.
    taken: Recommendations = {}
    # Remove the recommendations of an earlier workflow, except a file that --config reads.
    config_path = config_file(arguments)
    for suffix in (".json", ".toml"):
        earlier = stage_file(config.directory, RECOMMENDED).with_suffix(suffix)
        if config_path is None or config_path.resolve() != earlier.resolve():
            earlier.unlink(missing_ok=True)
    statuses = dict.fromkeys(STAGES, "not_run")
    stopped_at = ""
    for number, (name, about) in enumerate(STAGES.items(), 1):
        print(f"\n[{number}/{len(STAGES)}] {name}: {about}", flush=True)
        if taken:
            texts = [recommendation.text for recommendation in taken.values()]
            print(f"     with {', '.join(texts)}", flush=True)
        content = None
        if name != measure_again:
            content = reusable_result(config, name)
        if content is None:
            content = run_stage(config, name, arguments + options_of(taken))
        status = content["status"]
        statuses[name] = status
        # A failed check of `compile` does not prevent training: the stage recommends only a compile
        # mode that works, or the mode "none". So take its recommendation, if it has one.
        if status not in FAILED or (name == "compile" and status == "fail"):
            config = take_recommended(config, content, typed, taken)
        elif not config.workflow.keep_going:
            stopped_at = name
            break
    if not stopped_at:
        print(f"\n{RECOMMENDED}: Measure all recommended settings together.", flush=True)
        statuses[RECOMMENDED] = measure_together(given, config, taken)
    print()
    for name, status in statuses.items():
        print(f"{name:<12}{status.replace('_', ' ')}", flush=True)
    if stopped_at:
        for name, status in statuses.items():
            if status == "not_run":
                discard_outdated(config, name)
        way_out = "fix it and run this command again, or add --workflow.keep-going"
        print(f"stopped at {stopped_at}: {way_out}")
    return int(any(status in FAILED for status in statuses.values()))


def options_of(taken: Recommendations) -> list[str]:
    """Return the recommended settings as command-line options."""
    words: list[str] = []
    for setting, recommendation in taken.items():
        words += [flag(setting), str(recommendation.value)]
    return words


def run_stage(config: StageConfig, name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a stage in its own process; return its result, or status "crashed" if it wrote none."""
    # Remove an earlier result. If the stage crashes, that result would seem to be the new one.
    stage_file(config.directory, name).unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", PACKAGE, name, *arguments]
    # The stage stays in this process group, so that Ctrl-C reaches it, too. After Ctrl-C or
    # `terminate`, the stage itself ends the processes that it has started.
    process = subprocess.Popen(command, env=plain_environment())
    try:
        exit_code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    content = read_stage(config.directory, name)
    if content:
        return content
    alone = shlex.join(["python", "-m", PACKAGE, name, *arguments])
    print(f"{name} crashed (exit code {exit_code}); to run only this stage: {alone}")
    return {"status": "crashed"}


def reusable_result(config: StageConfig, name: str) -> dict[str, Any] | None:
    """Return the earlier result of a stage, or None if it must be measured (again)."""
    # A damaged file raises UserError. Its stage is measured again, like one that failed.
    with contextlib.suppress(UserError):
        content = read_stage(config.directory, name)
        if content is None or config.workflow.force:
            return None
        unchanged = with_effect(content) == with_effect(origin(config))
        if content["status"] != "fail" and unchanged:
            status = content["status"].replace("_", " ")
            when = printable(content["measured_at"])
            print(f"{status}, measured {when} (--workflow.force measures again)")
            return content
    print("measuring again: the result failed or is damaged, or settings, code or machine changed")
    return None


def discard_outdated(config: StageConfig, name: str) -> None:
    """Remove a stage's result if other code produced it, since the report would not say so."""
    with contextlib.suppress(UserError):
        content = read_stage(config.directory, name)
        if content and content["code"] != origin(config)["code"]:
            stage_file(config.directory, name).unlink(missing_ok=True)


def with_effect(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that affect a measurement: settings, code, torch and type of machine.

    `facts` is the return value of `origin`, or a stage's result, which has the same keys.
    """
    settings = {name: value for name, value in flatten(facts["settings"]) if has_effect(name)}
    machine = {key: facts["machine"].get(key) for key in ("device", "gpus", "cpu", "cores")}
    return {
        "settings": settings,
        "machine": machine,
        "code": facts["code"],
        "torch": facts["versions"].get("torch"),
    }


def has_effect(setting: str) -> bool:
    """Return whether a setting can affect a measurement."""
    section = setting.partition(".")[0]
    return setting not in WITHOUT_EFFECT and section not in WITHOUT_EFFECT


def read_stage(run_dir: Path, name: str) -> dict[str, Any] | None:
    """Return the result of a stage; None if it has not run; UserError for a damaged file."""
    path = stage_file(run_dir, name)
    if not path.exists():
        return None
    try:
        return result_in(path, name)
    except UserError as error:
        again = command_for(name, run_dir)
        reason = str(error).removeprefix(f"{path} ")
        raise UserError(f"{path} is damaged ({reason}): measure again with `{again}`") from None


def result_in(path: Path, *stages: str) -> dict[str, Any]:
    """Read the result of one of these stages from a file; UserError for any other file."""
    content = read_json(path)
    if not is_complete(content) or content["stage"] not in stages:
        raise UserError(f"{path} is not a result of a stage: {' or '.join(stages)}")
    return content


def is_complete(content: dict[str, Any]) -> bool:
    """Return whether this is a stage's JSON with all required keys."""
    for key, expected_type in RESULT_TYPES.items():
        if not isinstance(content.get(key), expected_type):
            return False
    return content["status"] in STATUSES


def user_metrics(records: list[dict[str, Any]]) -> list[str]:
    """Return the sorted names of the metrics that the user's code adds to metrics.jsonl."""
    names = set[str]()
    for record in records:
        for name in record:
            names.add(name.removeprefix("validation_"))
    # FIGURES matches the fields that the run itself writes.
    return sorted(name for name in names if not FIGURES.fullmatch(name))


def flag(setting: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{setting.replace('_', '-')}"


def advise(stage: Stage, text: str) -> None:
    """Print advice and add it to the stage's result, which keeps it even if all checks pass."""
    stage.advice.append(text)
    print(f"  -> {text}", flush=True)


def recommend(stage: Stage, setting: str, value: Any, factor: Interval | None = None) -> None:
    """Recommend a setting to later stages and to the user; `factor` is its speedup, if measured."""
    reason = stage.name
    if factor:
        reason += f": {factor} times as fast"
    text = f"{flag(setting)} {value} ({reason})"
    recommended = stage.figures.setdefault("recommended", {})
    recommended[setting] = {"value": value, "text": text}


def take_recommended(
    config: StageConfig, content: dict[str, Any], typed: set[str], taken: Recommendations
) -> StageConfig:
    """Apply a stage's recommendations to the settings, and add them to `taken`.

    Settings in `typed` stay as they are. If any recommendation is invalid, all are ignored.
    """
    new: Recommendations = {}
    try:
        for setting, advised in content["figures"].get("recommended", {}).items():
            if setting not in typed:
                new[setting] = Recommendation(value=advised["value"], text=str(advised["text"]))
        changed = override(config, values_of(new))
    except (ValueError, KeyError, TypeError, AttributeError):
        return config
    taken.update(new)
    return changed


def values_of(recommendations: Recommendations) -> dict[str, Any]:
    """Return the recommended values by setting."""
    return {setting: each.value for setting, each in recommendations.items()}


def typed_settings(arguments: list[str]) -> set[str]:
    """Return the settings named on a command line, or in a TOML file given by --config."""
    settings = set[str]()
    for word in arguments:
        if word.startswith("--"):
            option = word[2:].partition("=")[0]
            settings.add(option.replace("-", "_"))
    file = config_file(arguments)
    # The config.json of a run has all settings, so it does not show which ones the user has set.
    if file and file.suffix == ".toml":
        settings |= read_toml(file).keys()
    return settings


def config_file(arguments: list[str]) -> Path | None:
    """Return the file that a command line names with --config, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    given, _ = parser.parse_known_args(arguments)
    return given.config


def measure_together(given: StageConfig, final: StageConfig, taken: Recommendations) -> str:
    """Time the recommended settings against the given ones; return the status.

    Writes workflow/recommended.json. If there are recommendations, also writes recommended.toml,
    unless they made steps slower.
    """
    stage = Stage(RECOMMENDED, final)
    file = stage.file.with_suffix(".toml")
    texts = [recommendation.text for recommendation in taken.values()]
    stage.figures |= {"file": str(file), "settings": texts}
    passed: bool | None = True
    measured = "no faster settings than yours were found"
    # The interval between saves does not change how long a step takes. If no other setting is
    # recommended, there is nothing to time.
    if any(not setting.startswith("checkpoint.") for setting in taken):
        passed, measured = compare_speed(stage, given, final)
    uncompiled = "compile.mode" in taken and taken["compile.mode"].value == "none"
    if passed is False and uncompiled:
        # The user's settings compile, so their steps are faster. But the stage `compile` found a
        # reason not to compile: the losses differ, for example, or this run is too short for it.
        passed = True
        measured += ", without compiling, as the stage compile advises"
    wanted = "not slower than your settings"
    advice = "measure again when nothing else runs on this machine"
    stage.check("together", passed, measured=measured, wanted=wanted, advice=advice)
    if taken and passed is not False:
        for text in texts:
            print(f"     {text}")
        write_toml(file, given, taken)
        command = f"{command_for('train', final.directory)} --config {shlex.quote(str(file))}"
        stage.figures["command"] = command
        print(f"     to train with them: {command}")
    stage.close()
    return stage.status


def compare_speed(stage: Stage, given: StageConfig, final: StageConfig) -> tuple[bool | None, str]:
    """Time steps with both settings; return whether `final` passes, and a text for the check.

    `final` passes (True) unless it is slower (False). The result is None if the measurement is
    inconclusive or has failed.
    """
    print("     your settings and the recommended ones, interleaved ...", flush=True)
    try:
        seconds = time_steps({"given": on_disk(given), RECOMMENDED: final})
    except Exception as error:
        # For example, the two models together do not fit into memory.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None, f"not measured: {reason}"
    speedup, verdict = speedup_of(seconds["given"], seconds[RECOMMENDED])
    stage.figures["factor"] = list(speedup)
    measured = f"{speedup} times as fast as your settings: {verdict}"
    if verdict == TOO_NOISY:
        return None, measured
    return verdict != "slower", measured


def write_toml(path: Path, given: StageConfig, taken: Recommendations) -> None:
    """Write settings that differ from the defaults as TOML, with reasons for recommended ones."""
    # Start from `given`. `on_disk` may have removed an object store from the stages' settings.
    config = override(given, values_of(taken))
    defaults = dict(flatten(to_json(preset("", StageConfig))))
    lines = ["# Settings that the workflow recommends, on top of the defaults."]
    for name, value in flatten(to_json(config)):
        section = name.partition(".")[0]
        # TOML has no null.
        if section in LEFT_OUT_OF_TOML or value is None or value == defaults.get(name):
            continue
        line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
        if name in taken:
            line += f"  # {taken[name].text}"
        lines.append(line)
    replace_file(path, "\n".join(lines) + "\n")


def time_steps(configs: dict[str, StageConfig]) -> dict[str, list[float]]:
    """Time steps with each of the settings in interleaved windows, data loading included.

    Returns seconds per step, one value per window.
    """
    first = next(iter(configs.values()))
    world = join(first.parallel, first.device)
    # With `dynamic=None`, torch.compile makes a size dynamic when it sees a second value of that
    # size. Then the second of two micro-batch sizes would be compiled differently from the first.
    # So None becomes False.
    dynamic = {"compile.dynamic": bool(first.compile.dynamic)}
    states = {name: setup(override(config, dynamic), world) for name, config in configs.items()}
    ways = {name: with_loader(state) for name, state in states.items()}
    # The first steps may compile, so take two steps before the timing.
    for take_steps in ways.values():
        take_steps(2)
    # Loader workers deliver batches in bursts: 4 workers, 4 batches. So the number of steps in a
    # window must be a multiple of the number of workers of each configuration.
    workers = [max(1, config.train.loader_workers) for config in configs.values()]
    return time_interleaved(ways, multiple=math.lcm(*workers))
