"""The chain: what a stage recommends is handed to the stages after it, and measured in the end.

A recommendation counts as long as its stage's gate has not failed and nothing that it was measured
with has changed. `python -m` this module FOLDER TASK reads the settings FOLDER/given.json and
FOLDER/recommended.json and writes FOLDER/TASK.json: seconds per step of both, in turns.
"""

import itertools
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..config import from_json, override, preset
from ..distributed import join
from ..errors import RankError, UserError
from ..files import flatten, open_to_write, replacing, to_json, write_json
from ..train import setup
from . import STAGES, with_effect
from .processes import run_task
from .stage import PACKAGE, Stage, StageConfig, origin, read_stage, stage_file
from .timing import Interval
from .turns import in_turns, take_steps, times_as_fast

CHAIN = "recommended"  # of what the chain writes: workflow/recommended.json and .toml
# What a stage may recommend: no damaged file can set anything else.
SETTINGS = ("train.loader_workers", "train.micro_batch_size", "compile.mode", "checkpoint.every")
NOT_TRAINED = {"workflow", "fresh"}  # settings that recommended.toml leaves out
TIMEOUT = 1800.0  # seconds


class Link(NamedTuple):
    """One recommendation: how many times as fast it made the steps, where that was measured."""

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


def reject(
    stage: Stage, setting: str, value: Any, why: str, factor: Interval | None = None
) -> None:
    """Note what was tried and is not handed on, and why."""
    times = f", {factor} times as fast" if factor else ""
    text = f"{flag(setting)} {value}: {why}{times}"
    stage.figures.setdefault("rejected", []).append(text)


def go_on(config: StageConfig, name: str, typed: set[str]) -> tuple[StageConfig, list[Link]]:
    """The settings with what the stages before `name` recommend, except for options typed."""
    links: list[Link] = []
    for earlier in itertools.takewhile(lambda stage: stage != name, STAGES):
        try:
            content = read_stage(config.directory, earlier)
            if not content or content["status"] == "fail":
                continue
            found = content["figures"].get("recommended")
            if not found or with_effect(content) != with_effect(origin(config)):
                continue
            new = [
                Link(earlier, setting, of["value"], of["factor"] and Interval(*of["factor"]))
                for setting, of in found.items()
                if setting in SETTINGS and setting not in typed
            ]
            config = override(config, {link.setting: link.value for link in new})
        except (UserError, TypeError, KeyError, AttributeError):  # damaged: as if not measured
            continue
        links += new
    return config, links


def typed_settings(arguments: list[str]) -> set[str]:
    """The settings that are named on a command line."""
    words = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    return {word.replace("-", "_") for word in words}


def conclude(config: StageConfig, typed: set[str]) -> str:
    """Measure what the chain recommends against the given settings; its status.

    Writes workflow/recommended.toml, and recommended.json beside it.
    """
    final, links = go_on(config, "", typed)
    stage = Stage(CHAIN, final)
    file = stage_file(config.directory, CHAIN).with_suffix(".toml")
    stage.figures |= {"links": [str(link) for link in links], "file": str(file)}
    write_toml(file, final, links)
    timed = [link for link in links if link.setting != "checkpoint.every"]
    measured, passed = "no setting was found that is faster than the given ones", True
    if timed:
        try:
            speedup, verdict = compare(config, final)
            stage.figures["factor"] = list(speedup)
            measured, passed = f"{speedup} times where you began: {verdict}", verdict != "slower"
        except RankError as error:
            measured, passed = f"not measured: {error}", None
    wanted = "not slower than the given settings"
    advice = "measure again with --workflow.force when nothing else runs on this machine"
    stage.check("together", passed, measured=measured, wanted=wanted, advice=advice)
    for link in links:
        print(f"     {link}")
    print(f"     to use it: python -m {PACKAGE} train --config {file}")
    stage.close()
    return stage.status


def compare(given: StageConfig, recommended: StageConfig) -> tuple[Interval, str]:
    """How many times as fast steps with the recommended settings are, and a word for it."""
    print("     the given and the recommended settings, in turns ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="chain-") as scratch:
        folder = Path(scratch)
        write_json(folder / "given.json", to_json(given))
        write_json(folder / f"{CHAIN}.json", to_json(recommended))
        seconds = run_task("chain", folder, "seconds", seconds=TIMEOUT)
    if "error" in seconds:
        raise RankError(seconds["error"])
    return times_as_fast(seconds["given"], seconds[CHAIN])


def write_toml(path: Path, config: StageConfig, links: list[Link]) -> None:
    """What differs from the default preset, for `train --config`, and where it comes from."""
    usual = dict(flatten(to_json(preset("default", StageConfig))))
    sources = {link.setting: f"  # {link.stage}" for link in links}
    lines = ["# What the workflow recommends, on top of --preset default."]
    for name, value in flatten(to_json(config)):
        if value != usual.get(name) and value is not None and name.split(".")[0] not in NOT_TRAINED:
            lines.append(f"{name} = {json.dumps(value)}{sources.get(name, '')}")
    with replacing(path) as temporary, open_to_write(temporary) as file:
        file.write("\n".join(lines) + "\n")


def measure(folder: Path) -> dict[str, Any]:
    """Seconds per step with both settings, in windows taken in turns."""
    configs = {name: from_json(StageConfig(), folder / f"{name}.json") for name in ("given", CHAIN)}
    world = join(configs["given"].parallel, configs["given"].device)
    try:
        ways = {}
        for name, config in configs.items():
            ways[name] = partial(take_steps, setup(config, world))
            ways[name](2)  # compiled, and read ahead
        return in_turns(ways, world.device, untimed=1)
    except torch.OutOfMemoryError:
        return {"error": "both together do not fit into the memory"}


if __name__ == "__main__":
    folder, task = Path(sys.argv[1]), sys.argv[2]
    write_json(folder / f"{task}.json", measure(folder))
