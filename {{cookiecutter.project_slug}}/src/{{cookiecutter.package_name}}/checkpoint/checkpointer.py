"""Save and restore the state of a run.

`save` hands the tensors to the writer (writer.py), which stages them. `_publish` runs once they are
staged: the publisher (publish.py) has the files written and hashed, and publishes the checkpoint.
With checkpoint=dcp_async, staging copies the tensors in the background and `_publish`
runs in a thread. Otherwise training waits for the whole save, so staging copies nothing.

`restore` takes the newest good checkpoint, which the publisher finds and verifies, and checks that
this run saved it. `load` checks that no optimizer state would be lost, then reads the tensors.
"""

import contextlib
import json
import logging
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..distributed import Group, World
from ..ema import EMA
from ..errors import RankError, UserError, command_for, printable
from . import CheckpointError
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

if TYPE_CHECKING:
    from .base import Base

log = logging.getLogger(__name__)


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Saves and restores a run; all ranks call its methods together.

    A save begins in `save`, which hands the tensors to the writer. The rest is `_publish`: with
    checkpoint=dcp_async the writer's thread calls it, otherwise `save` waits for it.
    """

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
        """Open the run's storage.

        `facts` go into each manifest: "identity", which must match on restore, "schedule" and
        "config". All ranks call `facts_now` at each save, since it may be collective; rank 0's
        result (by default {}) goes in, too.
        """
        self.run_dir = run_dir
        self.config = config
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.facts = facts
        self.facts_now = facts_now
        self.group = Group(world)
        self.writer = Writer(config, self.group, model, world.device)
        self.publisher = open_storage(run_dir, config, self.group, facts.get("identity"))
        # The time that training has waited for saves.
        self.blocked_seconds = 0.0
        # The time to allocate host buffers for saves, which happens once in a run.
        self.buffers_seconds = 0.0
        # The step of the last checkpoint that was published without an error, or restored.
        self.last_good: int | None = None
        # The manifest of the checkpoint that was restored; {} in a new run.
        self.restored: dict[str, Any] = {}
        # The frozen weights that are not saved, if there are any.
        self.base: Base | None = None
        # The names of the frozen weights that the restored checkpoint leaves out.
        self.was_left_out: set[str] = set()
        # The callbacks whose state is saved, by name.
        self.remembered: dict[str, Any] = {}

    def remember(self, callbacks: Iterable[Any]) -> None:
        """Restore the saved state of each callback that has `state_dict()`; save it from now on."""
        saved = self.restored.get("callbacks")
        if not isinstance(saved, dict):
            saved = {}
        for callback in callbacks:
            if not hasattr(callback, "state_dict") or not hasattr(callback, "load_state_dict"):
                continue
            name = type(callback).__name__
            # Several callbacks of one class are told apart by their order: "Name", "Name+", ...
            while name in self.remembered:
                name += "+"
            self.remembered[name] = callback
            if name in saved:
                with only_warning_if_harmless(callback, f"the state of {name} is not restored"):
                    callback.load_state_dict(saved[name])
            elif self.restored:
                log.warning(
                    "the checkpoint has no state of the callback %s: it starts afresh", name
                )
            if name.endswith("+"):
                log.warning(
                    "the states of the callbacks %s and %s are told apart by their order only: a "
                    "resume needs the same order",
                    name[:-1],
                    name,
                )
        for name in saved.keys() - self.remembered.keys():
            log.warning(
                "the checkpoint has the state of a callback %s, which this run does not have: it "
                "is dropped (was the class renamed?)",
                printable(name),
            )

    def save(self, step: int, figures: Mapping[str, float] | None = None) -> None:
        """Save a checkpoint of `step`, unless it has already been saved.

        `figures` is the record of this step, if it has one. After a validation it also has the
        validation's metrics. The optimizer must not step before `before_optimizer_step()` has
        returned. Raises RankError, on every rank, when any rank failed; UserError for state that
        cannot be saved.
        """
        # No save is skipped: this waits until the previous one is published.
        with self._blocking():
            self.writer.settle()
        if step == self.last_good:
            return
        facts = self._facts_of(step, figures or {})
        # Do not merge this block with the one above. With --checkpoint.on-failure continue, an
        # error of the previous save ends that block and is only logged. This save must still begin.
        with self._blocking():
            self.writer.begin(self.tensors_to_save(), self._publish, step, facts)

    def _publish(self, step: int, facts: dict[str, Any]) -> None:
        """Write the staged tensors and publish them; in a thread with checkpoint=dcp_async.

        Collective. An error on any rank, here or in `publish`, is raised on all of them.
        """
        # `complete` checks the staged tensors. If it fails on one rank, it must fail on all: in the
        # collectives of `write`, the others would wait for that rank.
        with self.group.together():
            self.writer.complete()
        self.publisher.publish(step, self.writer.write, facts)
        self.last_good = step

    def _facts_of(self, step: int, figures: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields of the manifest that `publish` does not add; collective."""
        best = self.config.best
        # Such as "min validation_loss".
        rule = f"{self.config.best_is} {best}"
        score = figures.get(best)
        if score is not None:
            score = float(score)
        was_validated = "validation_loss" in figures
        # Only rank 0 warns, since the manifest gets rank 0's score. A callback may add the metric
        # only there, so its absence on another rank is no problem.
        if was_validated and score is None and self.group.is_first:
            log.warning("--checkpoint.best %s: the validation has no such metric", best)
        callbacks: dict[str, Any] = {}
        with self.group.together():
            for name, callback in self.remembered.items():
                with only_warning_if_harmless(callback, f"the state of {name} is not saved"):
                    callbacks[name] = state_of(name, callback)
        return {
            **self.facts,
            **self.facts_now(),
            "callbacks": callbacks,
            "samples": step * self.facts["identity"]["global_batch_size"],
            "world_size": self.world.size,
            "validation_loss": figures.get("validation_loss"),
            "score": [rule, score],
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def settle(self) -> None:
        """Wait for a save in flight; raises as `save` does."""
        with self._blocking():
            self.writer.settle()

    def before_optimizer_step(self) -> None:
        """Wait until a save in flight no longer reads the weights."""
        # The writer allocates its buffers once. They also hold the optimizer's state, which exists
        # after the first step, so this happens before the second one.
        if not self.writer.prepared and any(self.optimizer.state.values()):
            started = time.perf_counter()
            self.writer.prepare(self.tensors_to_save())
            self.buffers_seconds += time.perf_counter() - started
        with self._blocking():
            self.writer.wait_until_staged()

    def close(self) -> None:
        """Wait for a save in flight, and stop background threads."""
        try:
            self.settle()
        finally:
            self.writer.close()
        # Not in `_blocking`: even with --checkpoint.on-failure continue, the run must end with an
        # error if the newest checkpoint was not uploaded to an object store.
        started = time.perf_counter()
        self.publisher.close()
        self.blocked_seconds += time.perf_counter() - started

    def finish(self, step: int, figures: Mapping[str, float] | None = None) -> None:
        """Save the last step unless it is 0, and close; CheckpointError if it was not saved.

        `figures` are as in `save`.
        """
        if step:
            self.save(step, figures)
        self.close()
        if step and self.last_good != step:
            raise CheckpointError(
                f"step {step} was not saved; rerun to resume from the last saved step"
            )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """After an error, wait for a save in flight before the run directory is unlocked."""
        # With several ranks the process ends at once instead, since other ranks may be gone.
        if kind and self.world.size == 1:
            try:
                self.close()
            except (RankError, UserError) as error:
                # Raised here, it would replace the error that ends the run.
                log.warning("%s", error)

    def leave_out(self, base: "Base") -> None:
        """Leave the weights of a base out of checkpoints from now on."""
        self.base = base
        self.facts = {**self.facts, "base": base.entry}

    def tensors_to_save(self) -> Tensors:
        """Return the tensors of a checkpoint: all except those in its base; collective.

        Raises UserError, on every rank, if any rank finds that the base has changed.
        """
        tensors = self.tensors()
        if self.base is not None:
            with self.group.together():
                self.base.require_unchanged()
            for name in self.base.names:
                del tensors[f"model.{name}"]
        return tensors

    def tensors(self) -> Tensors:
        """Return the state of the run; the tensors share memory with model and optimizer."""
        tensors: Tensors = {}
        # The model comes first, since its state_dict() reshards FSDP's parameters.
        for name, tensor in self.model.state_dict().items():
            tensors[f"model.{name}"] = tensor
        for name, tensor in optimizer_tensors(self.model, self.optimizer).items():
            tensors[f"optimizer.{name}"] = tensor
        return tensors

    def restore(self, reset_optimizer: bool = False, base: Path | None = None) -> int:
        """Find, verify and load the newest good checkpoint; return its step, 0 if there is none.

        Collective. The whole checkpoint is verified before anything is loaded. `base` is the new
        path of weights that the checkpoint leaves out, if they have moved. Raises UserError if
        these weights are not there, if another run saved the checkpoint, or if optimizer state
        would be lost; `reset_optimizer` drops that state instead. These errors, and RankError if
        any rank cannot read the checkpoint, are raised on all ranks.
        """
        newest = self.publisher.newest_good()
        if newest is None:
            return 0
        path, manifest = newest
        # All ranks have the same manifest and the same facts, so all of them raise, or none.
        problems = identity_differences(manifest.get("identity"), self.facts["identity"])
        if problems:
            raise UserError(self._other_run(path, problems, self.publisher.start_over))
        if "base" in manifest:
            from .base import check_base

            manifest = check_base(manifest, base, self.run_dir, self.group)
        self.load(path, manifest, reset_optimizer)
        # Files that were downloaded from an object store are no longer needed.
        release_copies()
        log.info("resuming from %s", path)
        for change in identity_differences(manifest.get("schedule"), self.facts["schedule"]):
            log.info("the schedule has changed: %s", change)
        self.last_good = manifest["step"]
        self.restored = manifest
        return manifest["step"]

    def load(self, path: Place, manifest: dict[str, Any], reset_optimizer: bool = False) -> None:
        """Load the tensors of a verified checkpoint into the model and the optimizer; collective.

        Raises RankError, on every rank, if any rank cannot read the checkpoint. Then the model may
        be loaded in part. Raises UserError if optimizer state would be lost, unless
        `reset_optimizer`: on every rank, since the names of the tensors are the same on all.
        """
        # A new optimizer has no tensors yet into which its state could be read.
        create_optimizer_state(self.optimizer)
        with self.group.together():
            source = open_tensors(path, manifest)
        # If a checkpoint leaves out the weights of a base, its source has an attribute `stored`:
        # the tensors that are read from the base.
        for name in getattr(source, "stored", {}):
            self.was_left_out.add(name.removeprefix("model."))
        tensors = self.tensors()
        # Optimizer state that the checkpoint lacks. A missing weight is an error in `read`.
        missing: set[str] = set()
        for name in tensors.keys() - source.forms.keys():
            if name.startswith("optimizer."):
                missing.add(name)
        # Optimizer state that only the checkpoint has.
        lost: set[str] = set()
        for name in source.forms.keys() - tensors.keys():
            if must_not_be_lost(name):
                lost.add(name)
        if missing:
            # If the checkpoint has only a part of a parameter's state, not even this part is
            # loaded: it is lost.
            lost |= self._remove_unsaved_state(missing)
        if lost and not reset_optimizer:
            self._refuse_to_lose(lost, path, manifest)
        text = "%d tensors of the optimizer %s, e.g. %s"
        if missing:
            example = printable(min(missing))
            log.warning(text, len(missing), "are not in the checkpoint and start afresh", example)
        if lost:
            example = printable(min(lost))
            log.warning(text, len(lost), "are in the checkpoint and are not loaded", example)

        # Read what this run and the checkpoint both have, except state that was removed above.
        targets: Tensors = {}
        for name, tensor in tensors.items():
            if name not in missing and name not in lost:
                targets[name] = tensor
        source.read(targets, self.group)
        # State that is a plain number was read into a scalar tensor; write it back as a number.
        for name, holder, key in optimizer_slots(self.model, self.optimizer):
            value = holder[key]
            if isinstance(value, int | float):
                holder[key] = type(value)(tensors[f"optimizer.{name}"].item())

    def _remove_unsaved_state(self, missing: set[str]) -> set[str]:
        """Remove the new state of each parameter whose saved state is missing or incomplete.

        `missing` are the names that the checkpoint lacks. Returns the names of incomplete saved
        state, which the caller must not load. If only the average (EMA) is missing, only the
        average is removed.
        """
        unused: set[str] = set()
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            lacking = {key for key in state if f"optimizer.{name}.{key}" in missing}
            if lacking == {EMA}:
                # Only the average starts afresh, at the next step.
                del state[EMA]
            elif lacking:
                # Incomplete state is of no use. Without any, the optimizer treats the parameter as
                # it does in a new run.
                unused |= {f"optimizer.{name}.{key}" for key in state.keys() - lacking}
                del self.optimizer.state[parameter]
        return unused

    def _refuse_to_lose(self, lost: set[str], path: Place, manifest: dict[str, Any]) -> NoReturn:
        """Raise UserError, since a resume would lose optimizer state."""
        problems: list[str] = []
        # Among the settings in the schedule is the name of the optimizer. If that has changed, it
        # is probably the cause.
        for change in identity_differences(manifest.get("schedule"), self.facts["schedule"]):
            if change.startswith("name:"):
                problems.append(f"optim.{change}")
        problems.append(f"the optimizer would lose {len(lost)} tensors, e.g. {min(lost)}")
        way_out = "add --reset-optimizer, which loses these and keeps the weights"
        raise UserError(self._other_run(path, problems, way_out))

    def _other_run(self, path: Place, problems: list[str], way_out: str) -> str:
        """Return why this run cannot resume from a checkpoint, and the ways out."""
        lines = [f"this run cannot resume from {path}:"]
        for problem in problems:
            lines.append(f"  {problem}")
        # A new run has no config.json yet. It may find the checkpoints of another run, in an object
        # store for example.
        begin = "Add"
        if (self.run_dir / "config.json").exists():
            lines.append(f"Resume with the saved settings: {command_for('train', self.run_dir)}")
            begin = "Or add"
        lines.append(
            f"{begin} --name NEW to your command (and --run-dir NEW if it has one) for another run"
            f"{offer_weights(path, problems)}; or {way_out}."
        )
        # The names come from a file, which somebody may have crafted.
        return printable("\n".join(lines))

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """Count the time that training waits for the block.

        If on-failure is "continue", log a RankError instead of raising it.
        """
        started = time.perf_counter()
        try:
            yield
        except RankError as error:
            if self.config.on_failure == "stop":
                raise
            if self.world.rank == 0:
                text = "%s; earlier checkpoints are untouched (--checkpoint.on-failure continue)"
                log.warning(text, error)
        finally:
            self.blocked_seconds += time.perf_counter() - started


@contextlib.contextmanager
def only_warning_if_harmless(callback: Any, problem: str) -> Iterator[None]:
    """If the callback is `harmless`, log an error in the block as a warning after `problem`."""
    try:
        yield
    except Exception as error:
        if not getattr(callback, "harmless", False):
            raise
        log.warning("%s: %s", problem, error)


def state_of(name: str, callback: Any) -> Any:
    """Return a copy of a callback's state; UserError if JSON does not keep it as it is.

    It is a copy, since the state may change before a background save writes it.
    """
    state = callback.state_dict()
    is_kept = False
    copy = None
    with contextlib.suppress(TypeError, ValueError):
        copy = json.loads(json.dumps(state))
        # JSON turns tuples into lists, and keys that are numbers into strings. Compare texts, since
        # a NaN does not equal itself.
        is_kept = repr(copy) == repr(state)
    if not is_kept:
        raise UserError(
            f"the state of the callback {name} cannot be saved: JSON does not keep {state!r:.80}. "
            "Let its state_dict() return numbers, strings, lists and dictionaries with string keys"
        )
    return copy


def must_not_be_lost(name: str) -> bool:
    """Return whether a tensor is optimizer state of a parameter, except its average (EMA)."""
    is_of_optimizer = name.startswith("optimizer.")
    is_of_whole_group = name.startswith("optimizer.param_groups.")
    is_average = name.endswith(f".{EMA}")
    return is_of_optimizer and not is_of_whole_group and not is_average
