"""The last stage, the restore drill: everything that checkpoints are for, made to happen.

In a scratch directory of the run, on its storage, with its model, data and settings, a few steps
long: restored, loaded into other world sizes, damaged, killed. The run's own checkpoints are not
touched. What goes on in processes of its own is in drill.py, the killing in killing.py.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.manifest import published
from ..config import Config, override, to_json
from ..device import pick_device
from ..distributed import Group
from ..errors import RankError, UserError
from ..files import write_json
from ..run.directory import RunDirectory
from ..run.hardware import in_units
from . import gates, processes, scale
from .drill import EVERY, STEPS, bytes_of
from .gates import Stage
from .interval import judge_interval
from .judging import Undisturbed, judge_flips, judge_kills, judge_reshard, judge_roundtrip
from .killing import MOMENTS, PATIENCE, Killing, losses_of
from .measuring import describe

AT_ONCE = 4  # checkpoints on disk, at the height of the drill


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    step_seconds, checkpoint_bytes = from_baseline(config)
    stage = Stage("checkpoint", config)
    with scratch(config.directory, AT_ONCE * checkpoint_bytes) as folder:
        Drill(stage, folder).run(step_seconds)
    return stage.close()


def from_baseline(config: Config) -> tuple[float, int]:
    """Seconds of a step, bytes of a checkpoint; UserError if it is not measured, or damaged."""
    found = gates.need_stage(config.directory, "baseline", "checkpoint")
    again = f"measure again with `{gates.command('baseline', config.directory)}`"
    now = to_json(config)
    if found["code"] != gates.code_digest() or any(
        found["settings"].get(part) != now[part] for part in ("model", "data", "train")
    ):
        say(f"baseline was measured with other code or settings; to be sure of it, {again}")
    try:
        figures = found["figures"]
        bytes_saved = 3 * 4 * int(figures["parameters"])  # weights and two moments, in float32
        return float(figures["step_seconds"]["median"]), bytes_saved
    except (KeyError, TypeError, ValueError):
        path = gates.stage_file(config.directory, "baseline")
        raise UserError(f"{path} is damaged (its figures are not whole): {again}") from None


@contextlib.contextmanager
def scratch(run_dir: Path, needed: int) -> Iterator[Path]:
    """A directory in the run directory that is gone afterwards; UserError if the disk is too full.

    What a drill left that was itself killed goes as well, unless it is under way.
    """
    folder = run_dir / "workflow/.drill"
    with RunDirectory(folder, Group()):  # a lock; removes a directory with nothing else in it
        empty(folder)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"the drill needs about {in_units(needed)} in {run_dir} for {AT_ONCE} checkpoints, "
                f"and {in_units(free)} are free: make room there, or take another --run-dir"
            )
        try:
            yield folder
        finally:
            empty(folder)


def empty(folder: Path) -> None:
    """Remove all but the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


class Drill:
    """The parts of the drill, one after the other, in `folder`."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage, self.folder = stage, folder
        config = stage.config
        device = pick_device(config.device)
        self.ranks, self.more, self.why_one = world_sizes(config, device)
        self.exact = device.type == "cpu" or config.train.deterministic
        write_json(folder / "settings.json", to_json(override(config, settings(config))))

    def run(self, step_seconds: float) -> None:
        """All of them. Where one breaks down its check fails, and the others go on."""
        stage, ranks, folder = self.stage, self.ranks, self.folder
        many = f"{ranks} processes" if ranks else "one process"
        say(f"training {STEPS} steps undisturbed on {many}, saving every {EVERY}")
        digests = self.child(ranks, "train", "undisturbed")["digests"]
        middle, end = (digests[str(step)] for step in (STEPS - EVERY, STEPS))
        truth = Undisturbed(losses_of(folder / "undisturbed"), middle, end, self.exact)
        bytes_saved = bytes_of(published(folder / "undisturbed/checkpoints")[-1])

        loads: list[tuple[int, dict[str, Any]]] = []
        words, fresh, killing = [], {}, None
        if ranks:
            with self.failing("reshard"):
                say("loading into one process")
                loads.append((1, self.child(0, "reload", "undisturbed", "one")))
                words = ["undisturbed" if "refused" in loads[0][1] else "one"]
        say(f"restoring into {many} that never trained, flipping bits, timing saves")
        with self.failing("roundtrip", "corrupt_newest"):
            fresh = self.child(ranks, "fresh", *words)
            judge_roundtrip(stage, fresh["roundtrip"], truth)
            judge_flips(stage, fresh["flips"], truth)
        with self.failing("reshard"):
            if words and fresh:
                loads.append((ranks, {"digests": fresh["reloaded"]}))
                if self.more:
                    say(f"loading into {self.more} processes")
                    loads.append((self.more, self.child(self.more, "reload", "again")))
            if loads or not ranks:  # else it has failed already
                judge_reshard(stage, ranks, loads, truth, self.why_one)
        say(f"killing all of it in a save: {', '.join(MOMENTS)}")
        with self.failing("killed_while_saving"):
            launch = partial(self.start, ranks, "train", "killed")
            killing = Killing(launch, folder, "killed", STEPS)()
            judge_kills(stage, killing, truth)
        if fresh and killing and killing.kills:
            step = fresh["costs"]["step_seconds"]["median"] if ranks else step_seconds
            loaded = {size for size, found in loads if "digests" in found}
            stage.figures |= {"bytes": bytes_saved, "world_sizes": sorted({ranks or 1} | loaded)}
            self.conclude(fresh, killing, step)

    def conclude(self, fresh: dict[str, Any], killing: Killing, step_seconds: float) -> None:
        """The figures, what they mean for the interval, and what was proven."""
        costs, stage = fresh["costs"], self.stage
        restarts = sorted((kill.seconds for kill in killing.kills), key=lambda it: it["total"])
        restart = restarts[len(restarts) // 2]
        stage.figures |= {
            **{name: costs[name] for name in ("blocked_seconds", "blocked_first", "save_seconds")},
            "restart_seconds": restart,
            "lost_steps": max(kill.lost for kill in killing.kills),
        }
        print(
            f"     a save of {in_units(stage.figures['bytes'])} holds training up for "
            f"{describe(costs['blocked_seconds'], 1e3, ' ms')}, the first for "
            f"{1e3 * costs['blocked_first']:.2f} ms; published after "
            f"{describe(costs['save_seconds'], 1e3, ' ms')}"
        )
        print(
            f"     from kill to the next step {restart['total']:.1f} s: launch and imports "
            f"{restart['launch']:.1f}, restore {restart['restore']:.1f}, "
            f"first step {restart['first_step']:.1f}"
        )
        judge_interval(stage, stage.figures, step_seconds)
        if stage.status != "fail":
            saves = STEPS // EVERY + costs["saves"] + len(killing.kills)
            print(
                f"proven with {saves} saves, {len(killing.kills)} kills, {len(fresh['flips'])} "
                "flipped bits: what was saved comes back, and nothing else does"
            )

    def child(self, ranks: int, task: str, *words: str) -> dict[str, Any]:
        """What came of a task of drill.py."""
        with self.start(ranks, task, *words) as process:
            processes.finish(process, f"{task} {' '.join(words)}".strip(), PATIENCE)
        return json.loads((self.folder / f"{task}.json").read_text("utf-8"))

    def start(self, ranks: int, *words: str) -> contextlib.AbstractContextManager:
        """Processes for a task of drill.py."""
        return processes.started(ranks, str(self.folder), *words, module=f"{__package__}.drill")

    @contextlib.contextmanager
    def failing(self, *checks: str) -> Iterator[None]:
        """Let the checks fail that are not made yet, if something breaks down inside."""
        try:
            yield
        except RankError as error:
            for name in set(checks) - {check["name"] for check in self.stage.checks}:
                text = "; ".join(str(error).splitlines()[:3])
                self.stage.check(name, False, measured=text, wanted="to get that far")


def settings(config: Config) -> dict[str, Any]:
    """What is another in the drill than in the run: a few steps, often saved, no validation."""
    return {
        "train.steps": STEPS,
        "train.log_every": 1,
        "train.validate_every": 0,
        "train.validate_samples": config.train.global_batch_size,  # the last step always validates
        "checkpoint.every": EVERY,
        "checkpoint.keep": 2,
        "checkpoint.keep_every": 0,
        "checkpoint.on_failure": "stop",
        "profile.every": 0,
        "track": False,
    }


def world_sizes(config: Config, device: torch.device) -> tuple[int, int, str]:
    """Ranks to train on, and a third number to load into (0: none); or 0, 0, why one process."""
    (*_, ranks), why = scale.world_sizes(config, device)
    if ranks == 1:
        return 0, 0, why
    more = ranks + 1 if device.type == "cpu" else ranks // 2
    possible = 1 < more <= config.train.global_batch_size and not scale.refusal(config, more)
    return ranks, more if possible else 0, ""


def say(text: str) -> None:
    """One line, as a part begins."""
    print(f"     {text}", flush=True)
