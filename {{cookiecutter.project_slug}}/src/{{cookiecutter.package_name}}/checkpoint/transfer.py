"""Weights from elsewhere, and checkpoints that leave as one file and come back as a checkpoint.

A file made here has a note beside its tensors: manifest and settings of the run as JSON, in a
tensor of bytes (safetensors: in the header). It survives the conversions by `python -m
torch.distributed.checkpoint.format_utils`, and is what makes a file a checkpoint to resume from.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..distributed import Group
from ..errors import UserError
from ..files import sync_directory, write_json
from ..run.directory import RunDirectory
from .checkpointer import forms_of, nest
from .manifest import MANIFEST, MANIFEST_LIMIT, CheckpointError
from .publish import RetentionConfig, Snapshots, checkpoints_of
from .reader import NOTE, SAFETENSORS, OneFile, Parts, Tensors, find_tensors, open_tensors
from .remote import Place, RemotePath
from .tensors import of_place
from .writing import write_shards

MODEL, OPTIMIZER = "model", "optimizer"
FILES = (".pt", ".pth", SAFETENSORS)
OF_ONE_CHECKPOINT = ("step", "files", "folder", "format_version", "digest")  # not for another


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to write, and where."""

    to: Path
    """FILE.pt (torch.save), FILE.safetensors, or a directory for a run to go on in."""
    step: int | None = None
    """Take the checkpoint of this step (default: the newest good one)."""
    source: Path | None = None
    """Take another run, checkpoint, DCP directory or file than the run of that name."""
    like: Path | None = None
    """The run (with --step) or checkpoint that the source comes from, if that does not say so."""
    optimizer: bool | None = None
    """With the optimizer's state (default: yes, but for safetensors)."""


def export(run_dir: Path, options: ExportConfig) -> str:
    """Write a checkpoint as something else, in this one process; says what was written.

    UserError when there is something at `to` already, and when the source does not say which run it
    is of. Takes as much host memory as the result takes on disk.
    """
    target = options.to
    if target.exists() and (not target.is_dir() or target.suffix in FILES or os.listdir(target)):
        raise UserError(f"{target} is there already: give another place, nothing is overwritten")
    if not target.absolute().parent.is_dir() and target.suffix in FILES:
        raise UserError(f"{target}: there is no folder {target.parent}")
    if target.suffix not in FILES and target.suffix[1:].isalpha():
        raise UserError(f"{target}: files are {', '.join(FILES)}; a run is a directory")
    path, manifest = find_tensors(options.source or run_dir, options.step)
    source = open_source(path, manifest)
    note = note_of(path, manifest, options.source or run_dir) or read_note(source)
    if options.like and not note:
        note = note_of(*find_tensors(options.like, options.step))
    if not note:
        raise UserError(
            f"{path} does not say which run and step it is of: name a checkpoint of that run with "
            "--like (or take the weights alone into a new run: train --init-from)"
        )
    if options.step not in (None, step := note["manifest"]["step"]):
        raise UserError(f"{path} is of step {step}, not {options.step}")
    optimizer = options.optimizer
    if optimizer is None:
        optimizer = target.suffix != SAFETENSORS
    tensors = read_state(source, note, optimizer)
    if optimizer and not tensors[OPTIMIZER]:
        raise UserError(
            f"{path} has no state of an optimizer: training would not go on as it was. To take the "
            "weights all the same, and start its state afresh: --optimizer False"
        )
    if target.suffix in FILES:
        write_new(target, lambda file: write_file(file, tensors, note))
    else:
        publish(target, tensors, note)
    what = f"{len(tensors[MODEL])} tensors of the model"
    if optimizer:
        what += f", the optimizer's state of {len(tensors[OPTIMIZER])}"
    return f"{target}: step {step} from {path}; {what}"


def load_weights(
    where: Path, model: nn.Module, step: int | None, group: Group, strict: bool = False
) -> str:
    """Load weights alone into a model, from whatever holds some; says what was done.

    What only one side has is left out and listed, or refused when `strict`. UserError also when a
    tensor has another shape or when nothing fits.
    """
    path, manifest = group.from_first(lambda: find_tensors(where, step))
    opened: list[Parts | OneFile] = []

    def look() -> str:
        opened.append(open_source(path, manifest))
        return of_place(path)

    found = group.agree(look)
    group.from_first(lambda: all_alike(found, path))
    (source,) = opened
    ours = model.state_dict()
    saved = weight_names(source.forms, ours)
    common = [name for name in ours if name in saved]
    for name in common:
        if (shape := source.forms[saved[name]].shape) != ours[name].shape:
            raise UserError(f"{path}: {name} is {list(shape)}, wanted {list(ours[name].shape)}")
    if not common:
        raise UserError(f"{path} and this model have no parameter name in common")
    aliases: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), set()).add(name)
    tied = set().union(*(names for names in aliases.values() if names & saved.keys()))
    texts = []
    for what, names in (
        ("missing there, left as they were", sorted(ours.keys() - saved.keys() - tied)),
        ("there but not wanted", sorted(saved.keys() - ours.keys())),
    ):
        if names:
            texts.append(f"{what}: {', '.join(names)}")
    if texts and strict:
        raise UserError(f"{path} does not fit this model to the letter; {'; '.join(texts)}")
    source.read({saved[name]: ours[name] for name in common}, group)
    return "; ".join([f"{len(common)} tensors from {path}", *texts])


def all_alike(found: list[str], path: Place) -> None:
    """UserError unless all ranks have found the same."""
    if len(set(found)) > 1:
        rank = next(rank for rank, other in enumerate(found) if other != found[0])
        raise UserError(
            f"rank {rank} sees other files at {path} than rank 0: put it where all see it"
        )


def open_source(path: Place, manifest: dict[str, Any]) -> Parts | OneFile:
    """Open what somebody has named; UserError when it cannot be read."""
    try:
        return open_tensors(path, manifest)
    except CheckpointError as error:
        raise UserError(str(error)) from error


def weight_names(stored: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """The stored names of weights, by the names that a model may have for them.

    Files differ in what they put before a name ("model.", DDP's "module.") or inside (compile's
    "_orig_mod."): what fits most of the wanted names is taken off.
    """
    wanted = set(wanted)
    others = (NOTE, f"{OPTIMIZER}.")
    stored = [name for name in stored if name in wanted or not name.startswith(others)]

    def without(prefix: str) -> dict[str, str]:
        inside = ((name.replace("_orig_mod.", ""), name) for name in stored)
        return {n.removeprefix(prefix): full for n, full in inside if n.startswith(prefix)}

    prefixes = [
        "",
        "module.",
        *(f"{p}.{m}" for p in (MODEL, "state_dict") for m in ("", "module.")),
    ]
    return max(map(without, prefixes), key=lambda names: len(names.keys() & wanted))


def note_of(path: Place, manifest: dict[str, Any], run: Path | None = None) -> dict[str, Any]:
    """What a file made from the checkpoint at `path` has to say: {} without a manifest.

    Of one in a store, `run` may be the directory of the run that keeps its checkpoints there.
    """
    if not manifest:
        return {}
    if isinstance(path, RemotePath):
        ours = run is not None and checkpoints_of(run) == path.parent
        config = run / "config.json" if ours else None
    else:
        checkpoints = path.resolve().parent
        of_a_run = checkpoints.name == "checkpoints"
        config = checkpoints.parent / "config.json" if of_a_run else None
    settings = json.loads(config.read_text("utf-8")) if config and config.exists() else {}
    note = {"manifest": {k: v for k, v in manifest.items() if k != "files"}, "config": settings}
    if not is_note(note):
        raise UserError(f"{path} lacks what a run has to say in its {MANIFEST}")
    return note


def read_note(source: Parts | OneFile) -> dict[str, Any]:
    """The note in a file made here, {} if it has none or one that is not a note."""
    if NOTE not in source.forms:
        return {}
    form = source.forms[NOTE]
    if form.dtype != torch.uint8 or len(form.shape) != 1 or form.shape[0] > MANIFEST_LIMIT:
        return {}
    content = torch.empty(form.shape, dtype=torch.uint8)
    source.read({NOTE: content}, Group())
    try:
        note = json.loads(bytes(content.tolist()))
    except (ValueError, RecursionError):
        return {}
    return note if is_note(note) else {}


def is_note(note: Any) -> bool:
    """Whether a note holds all that its readers rely on."""
    try:
        facts = note["manifest"]
        dictionaries = (note["config"], facts["schedule"], facts["identity"]["parameters"])
        known = all(isinstance(part, dict) for part in dictionaries)
        known &= isinstance(facts["step"], int) and 0 <= facts["step"] < 1 << 62
        return known and isinstance(facts.get("validation_loss"), float | None)
    except (KeyError, TypeError, AttributeError):
        return False


def read_state(source: Parts | OneFile, note: dict[str, Any], optimizer: bool) -> Tensors:
    """Model and, if wanted, optimizer of a source as {"model": …, "optimizer": …}, on the host."""
    parameters = note["manifest"]["identity"]["parameters"]
    names = {(MODEL, name): full for name, full in weight_names(source.forms, parameters).items()}
    if optimizer:
        for full in source.forms:
            if full.startswith(f"{OPTIMIZER}."):
                name, _, key = full.removeprefix(f"{OPTIMIZER}.").rpartition(".")
                names[OPTIMIZER, name, key] = full
    if lost := parameters.keys() - {path[1] for path in names if path[0] == MODEL}:
        raise UserError(f"the source has no {', '.join(sorted(lost)[:3])}: not all of the model")
    if isinstance(source, OneFile):  # mapped: nothing is copied before it is written
        return nest((path, source.tensors[full]) for path, full in names.items())
    empty = {
        full: torch.empty(source.forms[full].shape, dtype=source.forms[full].dtype)
        for full in names.values()
    }
    source.read(empty, Group())
    return nest((path, empty[full]) for path, full in names.items())


def write_file(file: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Write a file of torch.save or, by its name, of safetensors (weights under plain names)."""
    if file.suffix == SAFETENSORS:
        if not tensors[OPTIMIZER]:  # for use elsewhere, where the settings (and paths) are no use
            note = {**note, "config": {}}
        named = dict(tensors[MODEL])
        for name, state in tensors[OPTIMIZER].items():
            named |= {f"{OPTIMIZER}.{name}.{key}": tensor for key, tensor in state.items()}
        seen: set[int] = set()
        for name, tensor in named.items():  # the format knows no tensor of two names
            place = tensor.untyped_storage().data_ptr()
            named[name] = tensor.clone() if place in seen else tensor.contiguous()
            seen.add(place)
        save_file(named, file, metadata={"format": "pt", NOTE: json.dumps(note)})
    else:
        content = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
        torch.save({**{k: v for k, v in tensors.items() if v}, NOTE: content}, file)


def publish(run_dir: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Publish as the one checkpoint of a new run, with the identity of the run it is of."""
    group, step = Group(), note["manifest"]["step"]
    facts = {k: v for k, v in note["manifest"].items() if k not in OF_ONE_CHECKPOINT}
    facts["identity"] = {**facts["identity"], "parameters": forms_of(tensors[MODEL])}
    with RunDirectory(run_dir, group) as directory:
        snapshots = Snapshots(run_dir / "checkpoints", RetentionConfig(), group)
        if note["config"]:
            here = {**note["config"].get("checkpoint", {}), "url": None, "local_first": False}
            write_json(run_dir / "config.json", {**note["config"], "checkpoint": here})
        snapshots.publish(step, lambda folder: write_shards(folder, tensors, group, 1), facts)
        directory.record_status("imported", step=step)


def write_new(target: Path, write: Callable[[Path], None]) -> None:
    """Write a file that is whole or not there; UserError when it cannot be or is there already."""
    temporary = target.with_name(f".{uuid.uuid4().hex[:8]}-{target.name}")
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode  # safetensors would make it private
        write(temporary)
        os.chmod(temporary, mode)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.link(temporary, target)  # fails if somebody else was faster, unlike a rename
        sync_directory(target.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch, of a full disk
        raise UserError(f"{target} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
