"""What a checkpoint holds, as tensors by name, and how it is read back without trusting it.

`{"model": {name: tensor}, "optimizer": {parameter: {key: tensor}}}`: tensors only, under the names
that `model.state_dict()` gives. No Python object is pickled, so none has to be unpickled; the rest
(step, samples, schedule, identity) is JSON in the manifest. Reading copies into the live tensors,
whole or sharded, so any world size and any parallelism can read what another has written.
"""

import io
import logging
import pickle
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.tensor import DTensor, distribute_tensor

from . import UserError
from .control import HostGroup, World
from .snapshots import RetentionConfig, Snapshots, step_name, verify

log = logging.getLogger(__name__)
# It says so to every plain process, though no_dist is given.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
WHOLE_FILE = "state.pt"
DCP_INDEX = ".metadata"
Tensors = dict[str, Any]  # nested: {"model": {name: tensor}, "optimizer": {name: {key: tensor}}}


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of an unwrapped model, sharing its memory."""
    tensors = model.state_dict()
    if odd := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
        raise UserError(f"only tensors can be checkpointed; {odd[0]} is extra state of a module")
    return dict(tensors)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state by parameter name; plain numbers in it come as scalar tensors."""
    return {
        name: {
            key: value if isinstance(value, torch.Tensor) else torch.tensor(value)
            for key, value in optimizer.state[parameter].items()
            if value is not None
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state, by a step that changes nothing worth keeping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def identity_of(model: nn.Module, **fields: Any) -> dict[str, Any]:
    """What must be equal for a run to go on: `fields`, and each parameter's shape and dtype."""
    return {
        **fields,
        "parameters": {
            name: [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in model_tensors(model).items()
        },
    }


def identity_differences(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name each field that differs, with both values."""
    differences = []
    for field in sorted(saved.keys() | ours.keys()):
        theirs, mine = saved.get(field), ours.get(field)
        if isinstance(theirs, dict) and isinstance(mine, dict):
            differing = [k for k in {**theirs, **mine} if theirs.get(k) != mine.get(k)]
            for key in differing[:3]:
                differences.append(f"{field} {key}: {theirs.get(key)} saved, {mine.get(key)} now")
            if len(differing) > 3:
                differences.append(f"{field}: {len(differing) - 3} more")
        elif theirs != mine:
            differences.append(f"{field}: {theirs} saved, {mine} now")
    return differences


def agree_on_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks the same persistent buffers: the mean of those that differ (batch statistics).

    Equal buffers keep their bits. Integers (batches counted) are the same on all ranks anyway.
    """
    saved = model.state_dict(keep_vars=True)
    buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
    if world.size == 1 or not buffers:
        return
    flat = torch.cat([buffer.detach().flatten().float() for buffer in buffers])
    extremes, total = torch.stack([flat, -flat]), flat.clone()
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    agreed = torch.where(extremes[0] == -extremes[1], flat, total / world.size)
    for buffer, values in zip(buffers, agreed.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def share_of(tensors: Tensors, rank: int, size: int) -> Tensors:
    """What this rank has to write: its shards, and a near-equal part of what all ranks hold."""
    flat = list(_walk(tensors))
    loads = [0] * size
    mine = set()
    for path, tensor in sorted(flat, key=lambda item: -item[1].nbytes):
        if isinstance(tensor, DTensor):
            mine.add(path)
            continue
        lightest = loads.index(min(loads))
        loads[lightest] += tensor.nbytes + 4096  # a small tensor has its cost too
        if lightest == rank:
            mine.add(path)
    return _nest((path, tensor) for path, tensor in flat if path in mine)


def write_shards(directory: Path, tensors: Tensors, group: HostGroup, threads: int) -> list[str]:
    """Write this rank's part with DCP (a collective call); return the names of its files."""
    # Files are synced once, together with their directory, by whoever publishes them.
    writer = dcp.FileSystemWriter(directory, thread_count=threads, sync_files=False)
    dcp.save(tensors, storage_writer=writer, process_group=group.group, no_dist=not group.group)
    names = [path.name for path in directory.glob(f"__{group.rank}_*")]
    return [*names, DCP_INDEX] if group.rank == 0 else names


def read_into(path: Path, manifest: dict[str, Any], tensors: Tensors, group: HostGroup) -> None:
    """Copy a verified checkpoint into live tensors, each rank the parts it holds."""
    if WHOLE_FILE in manifest["files"]:
        saved = torch.load(path / WHOLE_FILE, mmap=True, weights_only=True, map_location="cpu")
        for keys, target in _walk(tensors):
            source = saved
            for key in keys:
                source = source[key]
            if isinstance(target, DTensor):
                placement = target.device_mesh, target.placements
                source = distribute_tensor(source, *placement, src_data_rank=None)
            target.copy_(source)
    else:
        reader = SafeReader(path, names=manifest["files"].keys())
        dcp.load(
            tensors,
            storage_reader=reader,
            planner=TensorsOnly(),
            process_group=group.group,
            no_dist=not group.group,
        )


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, less its trust: it would run any code that a crafted `.metadata` asks for."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        super().__init__(path)
        self.names = frozenset(names)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Read the index through the allow-list; it may point only to files of the manifest."""
        index = MetadataUnpickler(io.BytesIO((Path(self.path) / DCP_INDEX).read_bytes())).load()
        for info in index.storage_data.values():
            if info.relative_path not in self.names or info.transform_descriptors:
                raise pickle.UnpicklingError(f"{DCP_INDEX} points to {info.relative_path!r}")
        index.storage_meta = index.storage_meta or metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class TensorsOnly(dcp.DefaultLoadPlanner):
    """Refuses byte entries: DCP would unpickle them freely, and our checkpoints have none."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Refuse."""
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor")


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles the index of a DCP checkpoint and nothing else."""

    allowed = frozenset(
        {
            *((metadata.__name__, name) for name in vars(metadata) if "Meta" in name),
            (metadata.__name__, "_MEM_FORMAT_ENCODING"),
            (metadata.__name__, "TensorProperties"),
            (filesystem.__name__, "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("collections", "OrderedDict"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Resolve an allowed global; UnpicklingError for any other."""
        if (module, name) in self.allowed:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{DCP_INDEX} asks for {module}.{name}: refused")


class Recovery:
    """What the three kinds of checkpointer share: restoring, publishing, counting blocked time."""

    def __init__(
        self,
        run_dir: Path,
        retention: RetentionConfig,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: dict[str, Any],
    ) -> None:
        """`facts` goes into every manifest; its "identity" must match what is restored."""
        self.world, self.model, self.optimizer, self.facts = world, model, optimizer, facts
        self.group = HostGroup(world)
        self.snapshots = Snapshots(run_dir / "checkpoints", retention, self.group)
        self.blocked_seconds = 0.0
        self.last_saved: int | None = None
        self.restored: dict[str, Any] | None = None

    def tensors(self) -> Tensors:
        """All that is saved, sharing memory with the model and the optimizer."""
        optimizer = optimizer_tensors(self.model, self.optimizer)
        return {"model": model_tensors(self.model), "optimizer": optimizer}

    def restore(self) -> int:
        """Load the newest good checkpoint; its step, or 0 when there is none to load."""
        found = self.snapshots.newest_good()
        if found is None:
            return 0
        path, manifest = found
        if problems := identity_differences(manifest["identity"], self.facts["identity"]):
            raise UserError(
                f"this run cannot go on from {path}:\n  "
                + "\n  ".join(problems)
                + "\nStart another run (--name NAME), set this one aside (--fresh), or take over "
                f"the weights alone (--name NAME --init-from {path})."
            )
        create_optimizer_state(self.optimizer)
        tensors = self.tensors()
        read_into(path, manifest, tensors, self.group)
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if value is not None and not isinstance(value, torch.Tensor):
                    state[key] = type(value)(tensors["optimizer"][name][key].item())
        self.restored, self.last_saved = manifest, manifest["step"]
        return manifest["step"]

    def publish(self, step: int, write: Any, validation_loss: float | None) -> None:
        """Publish what `write(directory)` writes as the checkpoint of `step`."""
        facts = {
            **self.facts,
            "samples": step * self.facts["identity"]["global_batch_size"],
            "world_size": self.world.size,
            "validation_loss": validation_loss,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self.snapshots.publish(step, write, facts)


def find_checkpoint(where: Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Verify and pick a checkpoint to read from: a run directory's newest good one, or one by step.

    `where` may also be a checkpoint itself. Nothing is changed: a run may be writing beside us.
    """
    if (where / "manifest.json").exists():
        candidates = [where]
    elif step is not None:
        candidates = [where / "checkpoints" / step_name(step)]
    else:
        candidates = sorted((where / "checkpoints").glob("step_*[0-9]"), reverse=True)
    for path in candidates:
        manifest, problems = verify(path)
        if not problems:
            return path, manifest
        if path.exists():  # else it was pruned while we looked
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    wanted = f"a good checkpoint of step {step}" if step is not None else "a good checkpoint"
    raise UserError(f"there is no {wanted} in {where}: train first, or see what `verify` says")


def load_weights(where: Path, model: nn.Module, step: int | None, group: HostGroup) -> str:
    """Load weights alone into a model, leaving out what only one side has; says what was done.

    UserError when a tensor has another shape or when nothing fits.
    """
    path, manifest = group.from_first(lambda: find_checkpoint(where, step))
    saved = manifest["identity"]["parameters"]
    ours = identity_of(model)["parameters"]
    common = {name: tensor for name, tensor in model_tensors(model).items() if name in saved}
    if wrong := [name for name in common if saved[name][:-1] != ours[name][:-1]]:
        name = wrong[0]
        raise UserError(f"{path}: {name} has shape {saved[name][:-1]}, wanted {ours[name][:-1]}")
    if not common:
        raise UserError(f"{path} and this model have no parameter name in common")
    read_into(path, manifest, {"model": common}, group)
    text = f"{len(common)} tensors from {path}"
    if missing := ours.keys() - saved.keys():
        text += f"; not there, left as they were: {', '.join(sorted(missing))}"
    if unexpected := saved.keys() - ours.keys():
        text += f"; there but not wanted: {', '.join(sorted(unexpected))}"
    return text


def verify_run(run_dir: Path) -> list[tuple[Path, dict[str, Any], list[str]]]:
    """Verify every published checkpoint of a run: its path, manifest and problems."""
    from .snapshots import published

    return [(path, *verify(path)) for path in published(run_dir / "checkpoints")]


def _walk(tree: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _walk(value, (*path, key))
    else:
        yield path, tree


def _nest(flat: Iterable[tuple[tuple[str, ...], torch.Tensor]]) -> Tensors:
    # Both branches are always there: DCP wants the same top-level keys from every rank.
    tree: Tensors = {"model": {}, "optimizer": {}}
    for path, tensor in flat:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = tensor
    return tree
