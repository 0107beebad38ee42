"""What a checkpoint holds, as tensors by name, and how these come to be saved and restored.

`{"model": {name: tensor}, "optimizer": {parameter: {key: tensor}}}`: tensors only, under the names
that `model.state_dict()` gives. No Python object is pickled, so none has to be unpickled; the rest
(step, samples, schedule, identity) is JSON in the manifest.
"""

import logging
import platform
import time
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..distributed import Group, World
from ..errors import RankError, UserError
from .manifest import CheckpointError, digest_of
from .optimizers import GROUPS, create_optimizer_state, optimizer_parts, optimizer_tensors
from .publish import RetentionConfig, Snapshots, Writer
from .reader import Tensors, flat, open_tensors, walk
from .remote import located
from .tensors import identity_differences, refuse_odd_numbers
from .upload import Mirror, find_newest

log = logging.getLogger(__name__)
LONG = 1.0  # seconds of waiting that are worth a word


def __getattr__(name: str) -> Any:
    """A stand-in: the class lies beside its writer still."""
    if name in ("Checkpointer", "CheckpointConfig"):
        from . import writer

        return getattr(writer, name)
    raise AttributeError(name)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of an unwrapped model, sharing its memory."""
    tensors = model.state_dict()
    if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise UserError(f"only tensors can be checkpointed; {odd[0]} is extra state of a module")
    return dict(tensors)


def identity_of(model: nn.Module, **fields: Any) -> dict[str, Any]:
    """What must be equal for a run to go on: `fields`, and each parameter's shape and dtype."""
    return {**fields, "parameters": forms_of(model_tensors(model))}


def forms_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Shape and dtype of each tensor, as a manifest has them."""
    return {
        name: [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in tensors.items()
    }


def agree_on_identity(identity: dict[str, Any], group: Group) -> None:
    """UserError, on every rank, when one has other data or another model than rank 0."""
    brief = {**identity, "parameters": digest_of(identity["parameters"])}
    found = group.agree(lambda: brief)

    def compare() -> None:
        for rank, other in enumerate(found):
            if fields := [name for name in brief if other[name] != brief[name]]:
                values = ", ".join(f"{name} {other[name]} not {brief[name]}" for name in fields)
                raise UserError(
                    f"rank {rank} is not of the same run as rank 0: {values}. All machines need "
                    "the same code, settings and data"
                )

    group.from_first(compare)


def replicas_of(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """How many ranks hold the same part of a tensor as this one, and its place among them."""
    if not isinstance(tensor, DTensor):
        return size, rank
    copies, place = 1, 0
    mesh = tensor.device_mesh
    for length, mine, placement in zip(
        mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True
    ):
        if placement.is_replicate():
            copies, place = copies * length, place * length + mine
    return copies, place


def share_of(tensors: Tensors, rank: int, size: int) -> Tensors:
    """What this rank has to write: a near-equal part of what it and others hold alike."""
    flat = list(walk(tensors))
    loads: dict[int, list[int]] = {}
    mine = set()
    for path, tensor in sorted(flat, key=lambda item: -item[1].nbytes):
        copies, place = replicas_of(tensor, rank, size)
        load = loads.setdefault(copies, [0] * copies)
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes + 4096  # a small tensor has its cost too
        if lightest == place:
            mine.add(path)
    return nest((path, tensor) for path, tensor in flat if path in mine)


class Recovery:
    """A checkpointer but for how it saves: a subclass fills in `_save`, and what runs behind it."""

    _save: Callable[[int, float | None], None]
    """A subclass's own: save, or start to, and set `last_saved`."""
    failed = False
    """Whether this rank knows of a save in flight that failed: for the control word."""

    def __init__(
        self,
        run_dir: Path,
        retention: RetentionConfig,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: dict[str, Any],
    ) -> None:
        """`facts` go into each manifest: "identity", to be matched on restore, and "schedule"."""
        self.world, self.model, self.optimizer, self.facts = world, model, optimizer, facts
        self.staged_by = 0  # ranks that share the copies of a state in host memory
        self.group = Group(world)
        self.run_dir, store = run_dir, located(retention.url) if retention.url else None
        place = store if retention.far else run_dir / "checkpoints"
        who = retention, self.group, facts.get("identity")
        self.snapshots = Snapshots(place, *who)
        self.mirror = Mirror(store, *who) if retention.local_first else None
        if self.mirror:
            self.snapshots.in_use = lambda: self.mirror.path
        self.blocked_seconds = 0.0
        self.busy = False  # while training waits for a save
        self.last_saved: int | None = None
        self.told = False

    def save(self, step: int, validation_loss: float | None = None) -> None:
        """Save a checkpoint of `step`, once; RankError, on every rank, when any rank failed.

        With `on_failure="continue"` a failure is a warning. The optimizer must not step before
        `before_optimizer_step()` has returned.
        """
        before = self.blocked_seconds
        self.settle()  # a save is never skipped: this waits for the one before
        if step != self.last_saved:
            self._say_waited(self.blocked_seconds - before, step)
            self._attempt(self._save, step, validation_loss)

    def settle(self) -> None:
        """Wait for a save in flight; fails as `save` does."""
        self._attempt(self._settle)

    def before_optimizer_step(self) -> None:
        """Wait until a save in flight no longer needs the weights as they are."""

    def close(self) -> None:
        """Settle, and stop what runs behind."""
        self.settle()
        if self.mirror:
            self._attempt(self.mirror.finish)

    def finish(self, step: int) -> None:
        """Save the last step, if there was one, and close; CheckpointError if it was not saved."""
        if step:
            self.save(step)
        self.close()
        if step and self.last_saved != step:
            raise CheckpointError(f"step {step} was not saved; earlier ones are")

    def __enter__(self) -> "Recovery":
        """Nothing to do: the group is joined when it is made."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """After an error, see a save in flight to its end before the run directory is let go.

        Not among several ranks: there the process leaves at once, and the others may be gone.
        """
        if kind and self.world.size == 1:
            try:
                self.close()
            except RankError as error:
                log.warning("%s", error)

    def restore(self) -> int:
        """Load the newest good checkpoint; its step, or 0 when there is none to load."""
        found = find_newest(self.snapshots, self.mirror, self.run_dir)
        if found is None:
            return 0
        path, manifest = found
        if problems := identity_differences(manifest.get("identity"), self.facts["identity"]):
            own = self.run_dir / "config.json"  # not where a run goes on from a store
            ways = f"Go on as it was (--config {own}), start" if own.exists() else "Start"
            raise UserError(
                f"this run cannot go on from {path}:\n  "
                + "\n  ".join(problems)
                + f"\n{ways} another run (--name NAME), set this one aside (--fresh), or take over "
                f"the weights alone (--name NAME --init-from {path})."
            )
        create_optimizer_state(self.optimizer)
        opened = []  # together: where a rank fails alone, the others wait for it
        self.group.agree(lambda: opened.append(open_tensors(path, manifest)))
        source = opened[0]
        self._forget_state_not_in(source.forms.keys())
        tensors = self.tensors()
        optional = f"optimizer.{GROUPS}"  # an optimizer of another release may write none
        there = {n: t for n, t in flat(tensors) if n in source.forms or not n.startswith(optional)}
        source.read(there, self.group)
        for name, holder, keys in optimizer_parts(self.model, self.optimizer):
            for key in keys:
                if isinstance(value := holder[key], int | float):
                    holder[key] = type(value)(tensors["optimizer"][name][key].item())
        log.info("resuming from %s", path)
        for change in identity_differences(manifest.get("schedule"), self.facts["schedule"]):
            log.info("the schedule is another: %s", change)
        self.last_saved = manifest["step"]
        return manifest["step"]

    def tensors(self) -> Tensors:
        """All that is saved, sharing memory with the model and the optimizer."""
        # In this order: state_dict() is what brings FSDP's parameters back to their shards.
        model = model_tensors(self.model)
        return {"model": model, "optimizer": optimizer_tensors(self.model, self.optimizer)}

    def publish(
        self, step: int, write: Writer, part: Tensors, validation_loss: float | None
    ) -> None:
        """Publish what `write(directory)` writes as the checkpoint of `step`.

        `part` is this rank's part of it, which has to be made of numbers.
        """
        weights = {name for name, it in self.model.named_parameters() if it.requires_grad}
        self.group.agree(lambda: refuse_odd_numbers(walk(part), weights))
        facts = {
            **self.facts,
            "samples": step * self.facts["identity"]["global_batch_size"],
            "world_size": self.world.size,
            "validation_loss": validation_loss,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        path = self.snapshots.publish(step, write, facts)
        if self.mirror:
            self.mirror.submit(path)

    def _forget_state_not_in(self, saved: Set[str]) -> None:
        """Drop optimizer state that was not saved: a parameter may never have had a gradient."""
        missing = []
        for name, parameter in self.model.named_parameters():
            keys = {f"optimizer.{name}.{key}" for key in self.optimizer.state.get(parameter, {})}
            if not keys <= saved:
                missing.append(name)
                del self.optimizer.state[parameter]
        if missing:
            log.warning(
                "no optimizer state was saved for %d parameters, such as %s: it starts afresh",
                len(missing),
                missing[0],
            )

    def _settle(self) -> None:
        """Nothing is in flight after a save that waits."""

    def _say_waited(self, seconds: float, step: int) -> None:
        """Say, once, that training waits for saves; metrics.jsonl says it each time."""
        if seconds > LONG and self.world.rank == 0 and not self.told:
            self.told = True
            log.warning(
                "step %d: training waited %.1f s for the save before to end; saves take longer "
                "than %d steps: raise --checkpoint.every",
                *(step, seconds, self.snapshots.retention.every),
            )

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        started, self.busy = time.perf_counter(), True
        try:
            action(*arguments)
        except RankError as error:
            if self.snapshots.retention.on_failure == "stop":
                raise
            if self.world.rank == 0:
                log.warning("%s; going on, the checkpoints before are untouched", error)
        finally:
            self.busy = False
            self.blocked_seconds += time.perf_counter() - started


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nest(flat: Iterable[tuple[tuple[str, ...], torch.Tensor]]) -> Tensors:
    """The opposite of `walk`."""
    # Both branches are always there: DCP wants the same top-level keys from every rank.
    tree: Tensors = {"model": {}, "optimizer": {}}
    for path, tensor in flat:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = tensor
    return tree
