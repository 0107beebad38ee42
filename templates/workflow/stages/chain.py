"""Run the stages in order: what each recommends is handed to the next, and all is measured at last.

A recommendation counts as long as its stage's gate has not failed. The next stages get it as an
option on their command line; `recommended.toml` has all of them.
"""

import argparse
import contextlib
import json
import math
import shlex
import signal
import subprocess
import sys
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
from .stage import PACKAGE, STATUSES, Stage, StageConfig, origin, stage_file

RECOMMENDED = "recommended"  # workflow/recommended.json and .toml
FAILED = ("fail", "crashed")
# Settings that recommended.toml leaves out.
NOT_TRAINED = {"workflow", "fresh", "reset_optimizer", "name", "run_dir"}
# Settings that change no measurement.
WITHOUT_EFFECT = {f"workflow.{name}" for name in ("force", "keep_going", "expect")}
WITHOUT_EFFECT |= {"init_from", "init_strict", "track", "tracker"} | NOT_TRAINED - {"workflow"}
FORM = dict.fromkeys(("figures", "settings", "machine", "versions"), dict)
FORM |= dict.fromkeys(("stage", "code", "measured_at"), str) | {"checks": list, "advice": list}
Recommendations = dict[str, tuple[Any, str]]  # by setting: its value, and the text that says why


def run_stages(given: StageConfig, arguments: list[str]) -> int:
    """Run each stage with these arguments in a process of its own; 0 if no gate failed, else 1.

    A stage measured before with the same settings and code is not run again, so the same command
    continues an interrupted workflow. The first failed gate ends it, except
    for `compile` and with `--workflow.keep-going`.
    """
    signal.signal(signal.SIGTERM, leave)
    config, typed = on_disk(given), typed_settings(arguments)
    taken: Recommendations = {}
    for suffix in (".json", ".toml"):
        stage_file(config.directory, RECOMMENDED).with_suffix(suffix).unlink(missing_ok=True)
    results, stopped = dict.fromkeys(STAGES, "not_run"), ""
    for number, (name, about) in enumerate(STAGES.items(), 1):
        print(f"\n[{number}/{len(STAGES)}] {name}: {about}", flush=True)
        if taken:
            print(f"     with {', '.join(text for _, text in taken.values())}", flush=True)
        options = [word for name, (value, _) in taken.items() for word in (flag(name), str(value))]
        content = reusable_result(config, name) or run_stage(config, name, arguments + options)
        results[name] = content["status"]
        # Training does without a compile mode that fails: the stage recommends another or none.
        if content["status"] not in FAILED or (name, content["status"]) == ("compile", "fail"):
            config = take_recommended(config, content, typed, taken)
        elif not config.workflow.keep_going:
            stopped = name
            break
    else:
        print(f"\n{RECOMMENDED}: Measure all that the stages recommend, together.", flush=True)
        results[RECOMMENDED] = measure_together(given, config, taken)
    print()
    for name, status in results.items():
        print(f"{name:<12}{status.replace('_', ' ')}", flush=True)
    if stopped:
        print(f"stopped at {stopped}: fix it and rerun this command, or add --workflow.keep-going")
    return int(any(status in FAILED for status in results.values()))


def run_stage(config: StageConfig, name: str, arguments: list[str]) -> dict[str, Any]:
    """What a stage measured in a process of its own; "crashed" if it wrote no result."""
    stage_file(config.directory, name).unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", PACKAGE, name, *arguments]
    # In this process group: Ctrl-C reaches it, and it ends what it has started.
    process = subprocess.Popen(command, env=plain_environment())
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if content := read_stage(config.directory, name):
        return content
    alone = shlex.join(["python", "-m", PACKAGE, name, *arguments])
    print(f"{name} crashed (exit code {code}); to run it alone: {alone}")
    return {"status": "crashed"}


def reusable_result(config: StageConfig, name: str) -> dict[str, Any] | None:
    """What a stage measured, if it need not be measured again."""
    with contextlib.suppress(UserError):  # a damaged file counts as if the gate had failed
        content = read_stage(config.directory, name)
        if content is None or config.workflow.force:
            return None
        if content["status"] != "fail" and with_effect(content) == with_effect(origin(config)):
            status, when = content["status"].replace("_", " "), printable(content["measured_at"])
            print(f"{status}, measured {when} (--workflow.force measures again)")
            return content
    print("measuring again: it failed or is damaged, or the settings, code or machine have changed")
    return None


def with_effect(origin: dict[str, Any]) -> tuple[Any, ...]:
    """What can change a measurement: settings, code, torch and the kind of machine."""
    settings = {n: v for n, v in flatten(origin["settings"]) if has_effect(n)}
    machine = [origin["machine"].get(key) for key in ("device", "gpus", "cpu", "cores")]
    return settings, machine, origin["code"], origin["versions"].get("torch")


def has_effect(setting: str) -> bool:
    """Whether a setting can change a measurement."""
    return not {setting, setting.partition(".")[0]} & WITHOUT_EFFECT


def read_stage(run_dir: Path, name: str) -> dict[str, Any] | None:
    """What a stage measured, None if it has not run; UserError for a damaged file."""
    path = stage_file(run_dir, name)
    try:
        return result_in(path, name) if path.exists() else None
    except UserError as error:
        again = command_for(name, run_dir)
        raise UserError(f"{path} is damaged ({error}): measure again with `{again}`") from None


def result_in(path: Path, *stages: str) -> dict[str, Any]:
    """What one of these stages measured; UserError for any other file."""
    content = read_json(path)
    whole = all(isinstance(content.get(key), kind) for key, kind in FORM.items())
    if not whole or content["stage"] not in stages or content.get("status") not in [*STATUSES]:
        raise UserError(f"{path} is not a result of a stage: {' or '.join(stages)}")
    return content


def own_metrics(records: list[dict[str, Any]]) -> list[str]:
    """The names of the figures in lines of metrics.jsonl that are not the run's: yours."""
    names = {name.removeprefix("validation_") for record in records for name in record}
    return sorted(name for name in names if not FIGURES.fullmatch(name))


def flag(setting: str) -> str:
    """The option of a setting."""
    return f"--{setting.replace('_', '-')}"


def advise(stage: Stage, text: str) -> None:
    """Add to a stage what is worth trying, whatever passed, and print it."""
    stage.advice.append(text)
    print(f"  -> {text}", flush=True)


def recommend(stage: Stage, setting: str, value: Any, factor: Interval | None = None) -> None:
    """Hand a setting on to the stages after this one; `factor`: how many times as fast it is."""
    times = f": {factor} times as fast" if factor else ""
    text = f"{flag(setting)} {value} ({stage.name}{times})"
    stage.figures.setdefault("recommended", {})[setting] = {"value": value, "text": text}


def take_recommended(
    config: StageConfig, content: dict[str, Any], typed: set[str], taken: Recommendations
) -> StageConfig:
    """The settings with what a stage recommends, except for options typed; added to `taken`."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # damaged
        advised = content["figures"].get("recommended", {}).items()
        new = {n: (each["value"], str(each["text"])) for n, each in advised if n not in typed}
        config = override(config, {n: value for n, (value, _) in new.items()})
        taken |= new
    return config


def typed_settings(arguments: list[str]) -> set[str]:
    """The settings that are named on a command line, or in a TOML file given by --config."""
    options = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    named = {option.replace("-", "_") for option in options}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    file = parser.parse_known_args(arguments)[0].config
    return named | (read_toml(file).keys() if file and file.suffix == ".toml" else set())


def measure_together(given: StageConfig, final: StageConfig, taken: Recommendations) -> str:
    """Measure what the stages recommend against the given settings; its status.

    Writes workflow/recommended.toml, unless it is slower, and recommended.json beside it.
    """
    stage, texts = Stage(RECOMMENDED, final), [text for _, text in taken.values()]
    file = stage.file.with_suffix(".toml")
    stage.figures |= {"file": str(file), "settings": texts}
    measured, passed = "no setting was found that is faster than yours", True
    if any(not setting.startswith("checkpoint.") for setting in taken):
        print("     your settings and the recommended ones, interleaved ...", flush=True)
        try:
            seconds = time_steps({"given": on_disk(given), RECOMMENDED: final})
        except Exception as error:  # as when both do not fit into the memory
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            measured, passed = f"not measured: {reason}", None
        else:
            speedup, verdict = speedup_of(seconds["given"], seconds[RECOMMENDED])
            stage.figures["factor"] = list(speedup)
            measured = f"{speedup} times as fast as your settings: {verdict}"
            passed = None if verdict == TOO_NOISY else verdict != "slower"
    wanted = "not slower than your settings"
    advice = "measure again when nothing else runs on this machine"
    stage.check("together", passed, measured=measured, wanted=wanted, advice=advice)
    if taken and passed is not False:
        print("\n".join(f"     {text}" for text in texts))
        write_toml(file, given, taken)
        print(f"     to train with them: python -m {PACKAGE} train --config {file}")
    stage.close()
    return stage.status


def write_toml(path: Path, given: StageConfig, taken: Recommendations) -> None:
    """What differs from the default preset, for `train --config`, and why."""
    config = override(given, {setting: value for setting, (value, _) in taken.items()})
    usual = dict(flatten(to_json(preset("default", StageConfig))))
    lines = ["# What the workflow recommends, on top of --preset default."]
    for name, value in flatten(to_json(config)):
        if value != usual.get(name) and value is not None and name.split(".")[0] not in NOT_TRAINED:
            why = f"  # {taken[name][1]}" if name in taken else ""
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}{why}")
    replace_file(path, "\n".join(lines) + "\n")


def time_steps(configs: dict[str, StageConfig]) -> dict[str, list[float]]:
    """Seconds per step with each of the settings, in interleaved windows, data loading included."""
    first = next(iter(configs.values()))
    world = join(first.parallel, first.device)
    # Else the second compiles for any size of batch, since the first has shown another.
    static = {"compile.dynamic": bool(first.compile.dynamic)}
    states = {name: setup(override(config, static), world) for name, config in configs.items()}
    ways = {name: with_loader(state) for name, state in states.items()}
    for way in ways.values():
        way(2)  # compiles
    workers = (max(1, config.train.loader_workers) for config in configs.values())
    return time_interleaved(ways, multiple=math.lcm(*workers))
