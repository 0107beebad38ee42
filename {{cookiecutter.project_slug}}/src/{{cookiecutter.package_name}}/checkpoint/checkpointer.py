"""When a run saves, what it restores, and which checkpoints it may resume from.

A save, from `Checkpointer.save` on: the writer (writer.py) stages the tensors, at once or by a copy
in the background; `_publish` waits for that and lets the publisher (publish.py) have this rank's
files written, hashed and published. With checkpoint=dcp_async `_publish` runs in a thread.

A restore: the publisher finds and verifies the newest good checkpoint; `restore` compares whose it
is; `load` fits its tensors to the optimizer and reads them.
"""

import contextlib
import copy
import logging
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ..distributed import Group, World
from ..ema import EMA
from ..errors import RankError, UserError, command_for, printable
from . import CheckpointError, step_name
from .paths import Place, release_copies
from .reader import open_tensors
from .storage import open_storage
from .tensors import (
    Tensors,
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

        `figures`: those of the validation at this step, if there was one. The optimizer must not
        step before `before_optimizer_step()` has returned.
        """
        self.settle()  # a save is never skipped: this waits for the one before
        if step == self.last_good:
            return
        facts = self._facts_of(step, figures or {})
        with self._blocking():
            self.writer.begin(self.tensors(), self._publish, step, facts)

    def _publish(self, step: int, facts: dict[str, Any]) -> None:
        """Write what was staged, and publish it; in a thread with checkpoint=dcp_async."""
        # Before DCP's collectives, where a rank that is missing would make the others wait.
        with self.group.together():
            self.writer.complete()
        # So that retention need not read it back from the manifest.
        self.publisher.scores[self.publisher.directory / step_name(step)] = facts["score"]
        self.publisher.publish(step, self.writer.write, facts)
        self.last_good = step

    def _facts_of(self, step: int, figures: Mapping[str, float]) -> dict[str, Any]:
        """What the manifest says beside its files."""
        best = self.config.best
        score = figures.get(best)
        if score is None and "validation_loss" in figures:
            log.warning("--checkpoint.best %s: the validation has no such figure", best)
        callbacks: dict[str, Any] = {}
        for name, callback in self.remembered.items():
            # Copied: it may change before a save in the background writes it.
            callbacks[name] = copy.deepcopy(callback.state_dict())
        return {
            **self.facts,
            **self.facts_now(),
            "callbacks": callbacks,
            "samples": step * self.facts["identity"]["global_batch_size"],
            "world_size": self.world.size,
            "validation_loss": figures.get("validation_loss"),
            "score": [f"{self.config.best_is} {best}", None if score is None else float(score)],
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def settle(self) -> None:
        """Wait for a save in flight; fails as `save` does."""
        with self._blocking():
            self.writer.settle()

    def before_optimizer_step(self) -> None:
        """Wait until a save in flight no longer needs the weights as they are."""
        with self._blocking():
            # An optimizer has its state from its first step on.
            if not self.writer.prepared and any(self.optimizer.state.values()):
                self.writer.prepare(self.tensors())
            self.writer.wait_until_staged()

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
        tensors: Tensors = {}
        # The model first: state_dict() is what brings FSDP's parameters back to their shards.
        for name, tensor in self.model.state_dict().items():
            tensors[f"model.{name}"] = tensor
        for name, tensor in optimizer_tensors(self.model, self.optimizer).items():
            tensors[f"optimizer.{name}"] = tensor
        return tensors

    def restore(self, reset_optimizer: bool = False) -> int:
        """Find, verify and load the newest good checkpoint; its step, or 0 when there is none.

        It is verified as a whole before anything is loaded. UserError if another run saved it, or
        if optimizer state would be lost; `reset_optimizer` drops that state instead.
        """
        newest = self.publisher.newest_good()
        if newest is None:
            return 0
        path, manifest = newest
        if problems := identity_differences(manifest.get("identity"), self.facts["identity"]):
            raise UserError(self._other_run(path, problems, self.publisher.start_over))
        self.load(path, manifest, reset_optimizer)
        release_copies()
        log.info("resuming from %s", path)
        for change in identity_differences(manifest.get("schedule"), self.facts["schedule"]):
            log.info("the schedule is another: %s", change)
        self.last_good = manifest["step"]
        self.restored = manifest
        return manifest["step"]

    def load(self, path: Place, manifest: dict[str, Any], reset_optimizer: bool = False) -> None:
        """Load the tensors of a verified checkpoint into the model and the optimizer.

        Collective. UserError if optimizer state would be lost, unless `reset_optimizer`.
        """
        create_optimizer_state(self.optimizer)
        with self.group.together():
            source = open_tensors(path, manifest)
        tensors = self.tensors()
        # What the optimizer has now and the checkpoint has not, and the other way round.
        missing = {n for n in tensors.keys() - source.forms.keys() if n.startswith("optimizer.")}
        lost = {n for n in source.forms.keys() - tensors.keys() if STATE.fullmatch(n)}
        if missing:
            lost |= self._remove_unsaved_state(missing)
        if lost and not reset_optimizer:
            self._refuse_to_lose(lost, path, manifest)
        for names, fate in (missing, "not saved and start afresh"), (lost, "saved and left out"):
            if names:
                one = printable(min(names))
                log.warning("%d tensors of the optimizer %s, e.g. %s", len(names), fate, one)

        source.read({n: t for n, t in tensors.items() if n not in missing}, self.group)
        # The optimizer's plain numbers were read into tensors made for that.
        for name, holder, key in optimizer_slots(self.model, self.optimizer):
            if isinstance(value := holder[key], int | float):
                holder[key] = type(value)(tensors[f"optimizer.{name}"].item())

    def _remove_unsaved_state(self, missing: set[str]) -> set[str]:
        """Remove the new state of each parameter of which a checkpoint has only a part.

        `missing`: names that the checkpoint lacks. Returns those that it has and that are therefore
        left out.
        """
        unused: set[str] = set()
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            new = {key for key in state if f"optimizer.{name}.{key}" in missing}
            if new == {EMA}:
                del state[EMA]
            elif new:  # the parameter may never have had a gradient
                unused |= {f"optimizer.{name}.{key}" for key in state.keys() - new}
                del self.optimizer.state[parameter]
        return unused

    def _refuse_to_lose(self, lost: set[str], path: Place, manifest: dict[str, Any]) -> NoReturn:
        """UserError: a resume would lose state of the optimizer."""
        problems: list[str] = []
        for change in identity_differences(manifest.get("schedule"), self.facts["schedule"]):
            if change.startswith("name:"):
                problems.append(f"optim.{change}")
        problems.append(f"the optimizer would lose {len(lost)} tensors, e.g. {min(lost)}")
        way_out = "add --reset-optimizer, which loses these and keeps the weights"
        raise UserError(self._other_run(path, problems, way_out))

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
