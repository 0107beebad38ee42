"""What a stage recommends is handed to the stages after it, and measured together in the end.

A recommendation counts as long as its stage's gate has not failed and nothing that it was measured
with has changed. `python -m` this module FOLDER TASK reads the settings FOLDER/given.json and
FOLDER/recommended.json and writes FOLDER/TASK.json: seconds per step of both, in turns.
"""

import contextlib
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ..config import from_json, override, preset, read_toml
from ..distributed import join
from ..errors import RankError, UserError, command_for
from ..files import flatten, naming, open_to_write, read_json, replacing, to_json, write_json
from ..train import setup
from . import STAGES, earlier_status, with_effect
from .processes import run_task
from .stage import PACKAGE, STATUSES, Stage, StageConfig, origin, stage_file
from .turns import TOO_NOISY, Interval, in_turns, times_as_fast, with_reading, without_reading

RECOMMENDED = "recommended"  # workflow/recommended.json and .toml
# What a stage may recommend: no damaged file can set anything else.
SETTINGS = ("train.micro_batch_size", "train.loader_workers", "compile.mode", "checkpoint.every")
NOT_TRAINED = {"workflow", "fresh", "name", "run_dir"}  # settings that recommended.toml leaves out
TIMEOUT = 1800.0  # seconds
SHAPE = dict.fromkeys(("figures", "settings", "machine", "versions"), dict)
SHAPE |= {"checks": list, "advice": list, "seconds": float}
SHAPE |= dict.fromkeys(("stage", "code", "measured_at"), str)


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


def flag(setting: str) -> str:
    """The option of a setting."""
    return f"--{setting.replace('_', '-')}"


def recommend(stage: Stage, setting: str, value: Any, factor: Interval | None = None) -> None:
    """Hand a setting on to the stages after this one."""
    found = stage.figures.setdefault("recommended", {})
    found[setting] = {"value": value, "factor": factor and list(factor)}


def reject(stage: Stage, name: str, value: Any, why: str, factor: Interval | None = None) -> None:
    """Note what was tried and is not handed on, and why."""
    why = "faster, but not the best" if why == "faster" else why
    times = f", {factor} times as fast" if factor else ""
    text = f"{flag(name)} {value}: {why}{times}"
    stage.figures.setdefault("rejected", []).append(text)


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
    odd = [key for key, kind in SHAPE.items() if not isinstance(content.get(key), kind)]
    if odd or content.get("status") not in STATUSES or name not in ("", content["stage"]):
        raise UserError(f"{path} is not a result of {name or 'a stage'}")
    return content


def go_on(
    config: StageConfig, name: str, typed: set[str]
) -> tuple[StageConfig, list[Recommendation]]:
    """The settings with what the stages before `name` recommend, except for options typed."""
    taken: list[Recommendation] = []
    for earlier in itertools.takewhile(lambda stage: stage != name, STAGES):
        try:
            content = read_stage(config.directory, earlier)
            if not content or content["status"] == "fail":
                continue
            found = content["figures"].get("recommended")
            if not found or with_effect(content) != with_effect(origin(config)):
                continue
            new = [
                Recommendation(earlier, key, of["value"], interval(of["factor"]))
                for key, of in found.items()
                if key in SETTINGS and key not in typed
            ]
            config = override(config, {each.setting: each.value for each in new})
        except (ValueError, TypeError, KeyError, AttributeError):  # damaged: as if not measured
            continue
        taken += new
    return config, taken


def interval(factor: Any) -> Interval | None:
    """An interval out of JSON; ValueError or TypeError for anything else."""
    return None if factor is None else Interval(*map(float, factor))


def typed_settings(arguments: list[str]) -> set[str]:
    """The settings that are named on a command line, or in a TOML file given by --config."""
    words = [part for it in arguments for part in (it.split("=", 1) if it[:2] == "--" else [it])]
    named = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    for option, file in itertools.pairwise(words):
        if option == "--config" and file.endswith(".toml"):
            named |= read_toml(Path(file)).keys()
    return named


def forget(run_dir: Path) -> Path:
    """Remove what was recommended before; where the settings will be."""
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
    final, taken = go_on(config, "", typed)
    given = with_effect(origin(config))[0]
    with contextlib.suppress(UserError):  # damaged: measured again
        before = read_stage(config.directory, RECOMMENDED)
        same = before and before["figures"].get("given") == given
        if same and (status := earlier_status(final, RECOMMENDED)):
            return status
    file, stage = forget(config.directory), Stage(RECOMMENDED, final)
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


def time_both(given: StageConfig, recommended: StageConfig) -> tuple[Interval, str]:
    """How many times as fast steps with the recommended settings are, and a word for it."""
    print("     your settings and the recommended ones, in turns ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="together-") as scratch:
        folder = Path(scratch)
        write_json(folder / "given.json", to_json(given))
        write_json(folder / f"{RECOMMENDED}.json", to_json(recommended))
        seconds = run_task("chain", folder, "seconds", seconds=TIMEOUT)
    if "error" in seconds:
        raise RankError(seconds["error"])
    return times_as_fast(seconds["given"], seconds[RECOMMENDED])


def write_toml(path: Path, config: StageConfig, taken: list[Recommendation]) -> None:
    """What differs from the default preset, for `train --config`, and where it comes from."""
    usual = dict(flatten(to_json(preset("default", StageConfig))))
    sources = {each.setting: f"  # {each.stage}" for each in taken}
    lines = ["# What the workflow recommends, on top of --preset default."]
    for name, value in flatten(to_json(config)):
        if value != usual.get(name) and value is not None and name.split(".")[0] not in NOT_TRAINED:
            text = json.dumps(value, ensure_ascii=False)
            lines.append(f"{name} = {text}{sources.get(name, '')}")
    with replacing(path) as temporary, naming(path), open_to_write(temporary) as file:
        file.write("\n".join(lines) + "\n")


def measure(folder: Path) -> dict[str, Any]:
    """Seconds per step with both settings, in windows taken in turns."""
    from torch._dynamo import config as dynamo  # slow to import

    files = {name: folder / f"{name}.json" for name in ("given", RECOMMENDED)}
    configs = {name: from_json(StageConfig(), file) for name, file in files.items()}
    world = join(configs["given"].parallel, configs["given"].device)
    try:
        # Else the second compiles for any size of batch, since the first has shown another.
        with patch.object(dynamo, "automatic_dynamic_shapes", False):
            workers = {it.train.loader_workers for it in configs.values()}
            kind, multiple = without_reading, 1
            if len(workers) > 1:
                kind, multiple = with_reading, math.lcm(*(max(1, count) for count in workers))
            ways = {name: kind(setup(it, world)) for name, it in configs.items()}
            for way in ways.values():
                way(2)  # compiles
            return in_turns(ways, multiple=multiple)
    except torch.OutOfMemoryError:
        return {"error": "both together do not fit into the memory"}


if __name__ == "__main__":
    folder, task = Path(sys.argv[1]), sys.argv[2]
    write_json(folder / f"{task}.json", measure(folder))
