"""When a run saves, what it restores, and which checkpoints it may resume from.

A `Checkpointer` owns a writer (writer.py) and a publisher (publish.py). The loop calls `save`. The
writer copies the tensors, at once or in the background, then gives the publisher a function that
writes this rank's files.
"""

import contextlib
import copy
import logging
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import Group, World, parallel
from ..ema import EMA
from ..errors import RankError, UserError, command_for, printable
from ..files import flatten, to_json
from ..run.directory import OF_ONE_START
from . import CheckpointError
from .paths import Place, release_copies
from .publish import Write
from .reader import open_tensors
from .storage import open_storage
from .tensors import (
    Tensors,
    agree_on_identity,
    create_optimizer_state,
    identity_differences,
    offer_weights,
    optimizer_slots,
    optimizer_tensors,
)
from .writer import CheckpointConfig, Writer

log = logging.getLogger(__name__)
STATE = re.compile(rf"optimizer\.(?!param_groups\.).*(?<!\.{EMA})")  # of a parameter


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Saves and restores a run; all ranks call its methods together."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: dict[str, Any],
        facts_now: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`facts` go into each manifest: "identity", matched on restore, "schedule" and "config".

        So does what `facts_now`, called on all ranks at each save, returns on rank 0.
        """
        self.run_dir, self.config, self.world = run_dir, config, world
        self.model, self.optimizer = model, optimizer
        self.facts, self.facts_now = facts, facts_now
        self.group = Group(world)
        self.writer = Writer(config, self.group, model, world.device)
        self.publisher = open_storage(run_dir, config, self.group, facts.get("identity"))
        self.blocked_seconds = 0.0
        self.last_good: int | None = None  # published for certain
        self.restored: dict[str, Any] = {}  # the manifest
        self.remembered: dict[str, Any] = {}

    def remember(self, callbacks: Iterable[Any]) -> None:
        """Restore the saved state of each callback with `state_dict()`; save it from now on."""
        saved = self.restored.get("callbacks")
        for one in callbacks:
            if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
                name = type(one).__name__
                while name in self.remembered:  # another of its class
                    name += "+"
                self.remembered[name] = one
                if isinstance(saved, dict) and name in saved:
                    one.load_state_dict(saved[name])

    def save(self, step: int, figures: Mapping[str, float] | None = None) -> None:
        """Save a checkpoint of `step`, once; RankError, on every rank, when any rank failed.

        The optimizer must not step before `before_optimizer_step()` has returned.
        """
        self.settle()  # a save is never skipped: this waits for the one before
        if step == self.last_good:
            return
        figures, best = figures or {}, self.config.best
        score = figures.get(best)
        if score is None and "validation_loss" in figures:
            log.warning("--checkpoint.best %s: the validation has no such figure", best)
        facts = {
            **self.facts,
            **self.facts_now(),
            # Copied: it may change before a save in the background writes it.
            "callbacks": {n: copy.deepcopy(c.state_dict()) for n, c in self.remembered.items()},
            "samples": step * self.facts["identity"]["global_batch_size"],
            "world_size": self.world.size,
            "validation_loss": figures.get("validation_loss"),
            "score": [f"{self.config.best_is} {best}", score and float(score)],
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

        def publish(write: Write) -> None:
            self.publisher.publish(step, write, facts)
            self.last_good = step

        with self._blocking():
            self.writer.save(self.tensors(), publish)

    def settle(self) -> None:
        """Wait for a save in flight; fails as `save` does."""
        with self._blocking():
            self.writer.settle()

    def before_optimizer_step(self) -> None:
        """Wait until a save in flight no longer needs the weights as they are."""
        with self._blocking():
            # An optimizer has its state from its first step on.
            known = any(self.optimizer.state.values())
            self.writer.before_optimizer_step(self.tensors if known else dict)

    def close(self) -> None:
        """Settle, and end what runs in the background."""
        try:
            self.settle()
        finally:
            self.writer.close()
        with self._blocking():
            self.publisher.close()

    def finish(self, step: int) -> None:
        """Save the last step, if there was one, and close; CheckpointError if it was not saved."""
        if step:
            self.save(step)
        self.close()
        if step and self.last_good != step:
            raise CheckpointError(f"step {step} was not saved; earlier ones are")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """After an error, wait for a save in flight before the run directory is let go."""
        # Not among several ranks: there the process leaves at once, and the others may be gone.
        if kind and self.world.size == 1:
            try:
                self.close()
            except RankError as error:
                log.warning("%s", error)

    def tensors(self) -> Tensors:
        """All that is saved, sharing memory with the model and the optimizer."""
        # In this order: state_dict() is what brings FSDP's parameters back to their shards.
        model = self.model.state_dict().items()
        optimizer = optimizer_tensors(self.model, self.optimizer).items()
        return {f"model.{n}": t for n, t in model} | {f"optimizer.{n}": t for n, t in optimizer}

    def restore(self, reset_optimizer: bool = False) -> int:
        """Load the newest good checkpoint; its step, or 0 when there is none to load.

        It is verified as a whole before anything is loaded. UserError if another run saved it, or
        if optimizer state would be lost; `reset_optimizer` drops that state instead.
        """
        newest = self.publisher.newest_good()
        if newest is None:
            return 0
        path, manifest = newest
        if problems := identity_differences(manifest.get("identity"), self.facts["identity"]):
            raise UserError(self._other_run(path, problems, self.publisher.start_over))
        self._load(path, manifest, reset_optimizer)
        release_copies()
        log.info("resuming from %s", path)
        for change in identity_differences(manifest.get("schedule"), self.facts["schedule"]):
            log.info("the schedule is another: %s", change)
        self.last_good = manifest["step"]
        self.restored = manifest
        return manifest["step"]

    def _other_run(self, path: Place, problems: list[str], way_out: str) -> str:
        """Why this run cannot resume from a checkpoint, and the ways out."""
        lines = ["\n  ".join([f"this run cannot resume from {path}:", *problems])]
        if (self.run_dir / "config.json").exists():  # not if it resumes from an object store
            lines.append(f"Resume with the saved settings: {command_for('train', self.run_dir)}")
        lines.append(
            "Or add to your command --name NEW (--run-dir NEW if it has one) for another run"
            f"{offer_weights(path, problems)}; or {way_out}."
        )
        return printable("\n".join(lines))  # names in a file may be crafted

    def _load(self, path: Place, manifest: dict[str, Any], reset_optimizer: bool = False) -> None:
        """Load the tensors of a verified checkpoint into the model and the optimizer."""
        create_optimizer_state(self.optimizer)
        opened = []  # together: where a rank fails alone, the others wait for it
        self.group.agree(lambda: opened.append(open_tensors(path, manifest)))
        (source,) = opened
        tensors = self.tensors()
        missing = {n for n in tensors.keys() - source.forms.keys() if n.startswith("optimizer.")}
        lost = {n for n in source.forms.keys() - tensors.keys() if STATE.fullmatch(n)}
        for name, parameter in self.model.named_parameters() if missing else ():
            state = self.optimizer.state.get(parameter, {})
            new = {key for key in state if f"optimizer.{name}.{key}" in missing}
            if new == {EMA}:
                del state[EMA]
            elif new:  # the parameter may never have had a gradient
                lost |= {f"optimizer.{name}.{key}" for key in state.keys() - new}
                del self.optimizer.state[parameter]
        if lost and not reset_optimizer:
            changes = identity_differences(manifest.get("schedule"), self.facts["schedule"])
            problems = [f"optim.{change}" for change in changes if change.startswith("name:")]
            problems.append(f"the optimizer would lose {len(lost)} tensors, e.g. {min(lost)}")
            way_out = "add --reset-optimizer, which loses these and keeps the weights"
            raise UserError(self._other_run(path, problems, way_out))
        for names, fate in (missing, "not saved and start afresh"), (lost, "saved and left out"):
            if names:
                one = printable(min(names))
                log.warning("%d tensors of the optimizer %s, e.g. %s", len(names), fate, one)
        source.read({n: t for n, t in tensors.items() if n not in missing}, self.group)
        for name, holder, key in optimizer_slots(self.model, self.optimizer):
            if isinstance(value := holder[key], int | float):
                holder[key] = type(value)(tensors[f"optimizer.{name}"].item())

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """Count the time that training waits; a RankError is a warning if the settings say so."""
        started = time.perf_counter()
        try:
            yield
        except RankError as error:
            if self.config.on_failure == "stop":
                raise
            if self.world.rank == 0:
                log.warning("%s; training continues, earlier checkpoints are untouched", error)
        finally:
            self.blocked_seconds += time.perf_counter() - started


def start(state: Any, run_dir: Path, group: Group) -> Checkpointer:
    """Resume from the newest good checkpoint, or begin; UserError when the run is another one."""
    config, settings = state.config, state.config.train
    tensors = state.model.state_dict()
    if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise UserError(f"only tensors can be checkpointed; {odd[0]} is extra state of a module")
    forms = {n: [*t.shape, str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()}
    identity = {  # what must be equal for a resume
        "seed": settings.seed,
        "global_batch_size": settings.global_batch_size,
        "training_samples": state.loader.size,
        "data": state.spec.fingerprint,
        "parameters": forms,  # the shape and dtype of each
    }
    mine = OF_ONE_START | {"data.path"}  # what ranks may have of their own
    shared = {n: v for n, v in flatten(to_json(config)) if n not in mine}
    agree_on_identity({**identity, "settings": shared}, group)
    facts = {"identity": identity, "schedule": to_json(config.optim) | {"steps": settings.steps}}
    facts["config"] = to_json(config)  # for machines that share a store alone
    checkpointer = state.checkpointer = Checkpointer(
        *(run_dir, config.checkpoint, state.world, state.model, state.optimizer, facts),
        partial(state.loader.position, group),
    )
    state.step, origin = checkpointer.restore(config.reset_optimizer), config.init_from
    if state.step == 0 and origin:
        from .transfer import load_weights

        log.info("weights: %s", load_weights(origin, state.model, None, group, config.init_strict))
    if state.step or origin:
        parallel.compare_loaded(checkpointer.tensors().values(), state.world)
    state.loader.resume(state.step, checkpointer.restored, group)
    return checkpointer
