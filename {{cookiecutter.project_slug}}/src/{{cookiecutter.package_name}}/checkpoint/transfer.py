"""Weights from elsewhere, and checkpoints exported as one file and imported from one.

A .pt file made here has a note beside its tensors: manifest and settings of the run as JSON, in a
tensor of bytes. So it is a checkpoint to resume from.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn

from ..distributed import Group
from ..ema import EMA
from ..errors import UserError, printable
from ..files import fingerprint_files, read_json, replacing, sync_directory, write_json
from ..run.directory import RunDirectory
from . import DCP_INDEX, MANIFEST, CheckpointError, step_name
from .manifest import read_manifest, reading, verify
from .paths import Place, checkpoints_of, published, release_copies, storage_path
from .publish import Found, Publisher, RetentionConfig, best_by_validation
from .reader import open_tensors
from .tensors import (
    MODEL,
    NOTE,
    OPTIMIZER,
    SAFETENSORS,
    OneFile,
    Source,
    Tensors,
    is_named,
    nested,
    require_same_identity,
    weight_names,
)
from .writer import write_tensors

log = logging.getLogger(__name__)
Weights = Literal["last", "ema"]
Step = int | Literal["best"] | None
FILES = (".pt", ".pth", SAFETENSORS)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to write, and where."""

    to: Path
    """FILE.pt (torch.save, with the optimizer's state), FILE.safetensors (weights alone), FILE.pt2
    (a program of torch.export), or a directory for a run that resumes there"""
    step: Step = None
    """Step of the checkpoint, or "best" by validation; else the newest good one."""
    source: Path | None = None
    """Another run, checkpoint or exported file than the run of that name (for .pt2: a run)."""
    weights: Weights = "last"
    """Weights to write: the last ones, or their EMA (--optim.ema)."""
    base: Path | None = None
    """Where the weights are now that --checkpoint.frozen no left out, if they have moved."""


def export(run_dir: Path, options: ExportConfig) -> str:
    """Write a checkpoint as something else, in this one process; return a line that says so.

    Takes as much host memory as the result takes on disk, twice as much for safetensors.
    """
    target = options.to
    where = options.source or run_dir
    is_file = target.suffix in FILES
    is_empty_folder = target.is_dir() and not os.listdir(target)
    if target.exists() and (is_file or not is_empty_folder):
        raise UserError(f"{target} is there already: give another place, nothing is overwritten")
    is_for_transformers = re.fullmatch(r"(.*[-_.])?hf", target.name)
    if not is_file and (target.suffix[1:].isalpha() or is_for_transformers):
        kinds = f"files are {', '.join(FILES)}, .pt2; a run is a directory; hf and …-hf are for "
        kinds += "transformers, which needs a project with text=tokenizer"
        raise UserError(f"{target}: {kinds}")
    with_optimizer = target.suffix != SAFETENSORS
    path, manifest = find_checkpoint(where, options.step, base=options.base)
    with reading(path):
        source = open_tensors(path, manifest)
        note = make_note(where, path, manifest) if manifest else read_note(source)
        if not note:
            raise UserError(
                f"{path} does not say which run and step it is of: only checkpoints and .pt files "
                f"that `export` has made do. Begin a run with its weights: train --init-from {path}"
            )
        step = note["manifest"]["step"]
        if options.step not in (None, "best", step):
            raise UserError(f"{path} is of step {step}, not {options.step}")
        parameters = note["manifest"]["identity"]["parameters"]
        tensors = read_state(source, parameters, with_optimizer, options.weights)
    if is_file:
        write_file(target, tensors, note)
    else:
        import_as_run(target, tensors, note)
    release_copies()
    what = "model and optimizer" if with_optimizer else "the model"
    return f"{target}: step {step} from {path}; {len(tensors)} tensors of {what}"


def find_checkpoint(
    where: Place, step: Step = None, group: Group | None = None, base: Path | None = None
) -> Found:
    """Return a verified checkpoint to read from: a run's newest good one, the best, or one by step.

    `where` is a run or a checkpoint. It may also be a file of torch.save or safetensors, or a
    folder of safetensors or DCP: these have the manifest {} and cannot be verified. `base`: where
    the weights are now that the checkpoint leaves out. Collective with a `group`; nothing is
    changed. UserError if there is no good checkpoint.
    """
    group = group or Group()
    where = storage_path(where)
    paths: list[Place] = []
    have_manifests = True
    with group.together():
        if group.is_first:
            paths, have_manifests = candidates(where, step)
    paths, have_manifests = group.broadcast((paths, have_manifests))
    if not have_manifests:
        log.warning("%s has no manifest: whether it is whole cannot be verified", where)
        return paths[0], {}
    for path in paths:
        manifest, problems = verify(path, group)
        if not problems:
            if "base" in manifest:
                from .base import check_base

                manifest = check_base(manifest, base, run_of(path), group)
            return path, manifest
        # A run that still trains may have pruned it just now.
        if path.exists():
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    steps = [path.name.removeprefix("step_") for path in published(checkpoints_of(where))]
    hint = "train first"
    if steps:
        hint = f"there are steps {', '.join(str(int(number)) for number in steps)}"
    of_step = f" of step {step}" if step is not None else ""
    raise UserError(f"there is no good checkpoint{of_step} in {where}: {hint}")


def candidates(where: Place, step: Step) -> tuple[list[Place], bool]:
    """Return what `find_checkpoint` may take, the best first, and whether these have manifests."""
    if not where.exists():
        raise UserError(f"there is nothing at {where}")
    if (where / MANIFEST).exists():
        return [where], True
    if where.is_file() or (where / DCP_INDEX).exists():
        return [where], False
    directory = checkpoints_of(where)
    if step == "best":
        paths = [best_checkpoint(directory)]
    elif step is not None:
        paths = [directory / step_name(step)]
    else:
        paths = published(directory)[::-1]
    is_a_run = paths or not isinstance(where, Path) or (where / "status.json").exists()
    if not is_a_run and any(where.glob(f"*{SAFETENSORS}")):
        return [where], False
    return paths, True


def best_checkpoint(directory: Place) -> Place:
    """Return the checkpoint with the best validation; UserError if none was validated."""
    scores: dict[Place, Any] = {}
    for path in published(directory):
        with contextlib.suppress(CheckpointError, OSError):
            scores[path] = read_manifest(path)["score"]
    best = best_by_validation(scores)
    if best is None:
        raise UserError(f"no checkpoint in {directory} has a validation: give a --step by number")
    return best


def load_weights(
    where: Path,
    model: nn.Module,
    step: Step,
    group: Group,
    strict: bool = False,
    weights: Weights = "last",
    base: Path | None = None,
    new: tuple[str, ...] = (),
) -> str:
    """Load weights alone into a model, from anything that holds some; return a line about it.

    Collective. Tensors that only one side has are left out and listed, or refused when `strict`.
    `new`: tensors, or modules of them, that stay as they are. `base` as in `find_checkpoint`.
    UserError also when a tensor has another shape or when nothing fits.
    """
    path, manifest = find_checkpoint(where, step, group, base)
    with group.together():
        source = open_tensors(path, manifest)
        # A model with this method can begin with the files of another library. It gives their
        # tensors the names that they have in the model, and leaves other names alone.
        if not manifest and isinstance(source, OneFile) and hasattr(model, "from_transformers"):
            rename: Any = model.from_transformers
            with reading(path):
                source.forms = rename(source.forms)
    files = [source.path]
    if source.path.is_dir():
        files = sorted(file for file in source.path.iterdir() if file.is_file())
    content = fingerprint_files(source.path, files)
    require_same_identity({f"content of {path}": content}, group)

    ours = model.state_dict()
    left_new = {name for name in ours if is_named(name, new)}
    for each in new:
        if not any(is_named(name, (each,)) for name in ours):
            raise UserError(f"--init-new {each}: the model has no tensor or module of that name")
    saved = with_averages(weight_names(source.forms, ours), source, weights)
    common = [name for name in ours if name in saved and name not in left_new]
    for name in common:
        shape = source.forms[saved[name]].shape
        if shape != ours[name].shape:
            raise UserError(f"{path}: {_other_shape(name, shape, ours[name].shape)}")
    if not common:
        raise UserError(f"{path} and this model have no parameter name in common")
    notes: list[str] = []
    missing = [name for name in _missing_names(model, set(common)) if name not in left_new]
    if missing:
        notes.append(f"missing there, left as they were: {_listed(missing)}")
    # Under another name, a tensor may be one of the model's, as with an adapter of peft.
    used = {saved[name] for name in ours if name in saved}
    unused = sorted(name for name in saved.keys() - ours.keys() if saved[name] not in used)
    if unused:
        notes.append(f"there but not wanted: {_listed(unused)}")
    notes = [printable(note) for note in notes]
    if notes and strict:
        raise UserError(f"{path} does not match this model exactly; {'; '.join(notes)}")
    if left_new:
        notes.append(f"new, as --init-new says: {', '.join(sorted(left_new))}")
    source.read({saved[name]: ours[name] for name in common}, group)
    release_copies()
    return "; ".join([f"{len(common)} tensors from {path}", *notes])


def _listed(names: list[str]) -> str:
    """Join names by commas; after the tenth, only their number is given."""
    more = len(names) - 10
    if more > 0:
        names = [*names[:10], f"and {more} more"]
    return ", ".join(names)


def _other_shape(name: str, there: torch.Size, here: torch.Size) -> str:
    """Return how a tensor's shape differs from the one that was saved, and the way out."""
    text = f"{name} is {list(there)} there and {list(here)} in this model"
    way_out = f"Let it begin as build_model makes it: --init-new {name}"
    has_grown = len(here) == 2 and here[1:] == there[1:] and here[0] > there[0]
    if has_grown:
        text += f", {here[0] - there[0]} rows more (classes, a vocabulary, or positions)"
        way_out += ", or let build_model fill it with the old rows, too"
    return f"{text}. {way_out}"


def _missing_names(model: nn.Module, loaded: set[str]) -> list[str]:
    """Return the names of a model's tensors that are not loaded.

    A tied weight is loaded if one of its names is.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    is_loaded = {id(parameters[name]) for name in loaded if name in parameters}
    missing = []
    for name in model.state_dict():
        by_another_name = name in parameters and id(parameters[name]) in is_loaded
        if name not in loaded and not by_another_name:
            missing.append(name)
    return missing


def with_averages(saved: dict[str, str], source: Source, weights: Weights) -> dict[str, str]:
    """Return the stored names: of the averages if `weights` says so (UserError if there are none).

    A tensor without an average, such as a buffer, keeps its own.
    """
    if weights == "last":
        return saved
    averages: dict[str, str] = {}
    for name in saved:
        average = f"{OPTIMIZER}{name}.{EMA}"
        if average in source.forms:
            averages[name] = average
    if not averages:
        raise UserError(f"{source.path} has no average of the weights: train with --optim.ema")
    return saved | averages


def make_note(where: Place, path: Place, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the note for a file made from the checkpoint at `path`, found at `where`.

    The files config.json and spec.json of the run go into it. Where there are none, the manifest
    has the settings.
    """
    # With a store, `where` may be a run directory.
    run = run_of(path) or where
    manifest = dict(manifest)
    # What is exported has all weights.
    manifest.pop("base", None)
    note = {"manifest": manifest, "config": manifest["config"]}
    for name in ("config", "spec"):
        file = Path(str(run)) / f"{name}.json"
        if file.exists():
            note[name] = read_json(file)
    return note


def run_of(path: Place) -> Path | None:
    """Return the run directory that a checkpoint is in; None if it is in a store."""
    return path.resolve().parent.parent if isinstance(path, Path) else None


def read_note(source: Source) -> dict[str, Any]:
    """Return the note in a file made here, {} if it has none."""
    if not isinstance(source, OneFile) or NOTE not in source.forms:
        return {}
    # Somebody else's file may have any tensor of that name.
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        note = json.loads(source.forms[NOTE].numpy().tobytes())
        if note["manifest"]["identity"]:
            return note
    return {}


def read_state(
    source: Source, parameters: dict[str, Any], with_optimizer: bool, weights: Weights
) -> Tensors:
    """Read the model and, if wanted, the optimizer of a source into new memory on the host.

    UserError if a tensor of `parameters` is missing.
    """
    stored: dict[str, str] = {}
    for name in source.forms:
        if name.startswith(MODEL):
            stored[name.removeprefix(MODEL)] = name
    lost = parameters.keys() - stored.keys()
    if lost:
        raise UserError(f"the source has no {', '.join(sorted(lost)[:3])}: not all of the model")
    # The names of the tensors in the result, and in the source.
    names: dict[str, str] = {}
    for name, stored_name in with_averages(stored, source, weights).items():
        names[f"{MODEL}{name}"] = stored_name
    if with_optimizer:
        for name in source.forms:
            if name.startswith(OPTIMIZER):
                names[name] = name
    tensors: Tensors = {}
    for stored_name in names.values():
        form = source.forms[stored_name]
        tensors[stored_name] = torch.empty(form.shape, dtype=form.dtype)
    source.read(tensors, Group())
    return {name: tensors[stored_name] for name, stored_name in names.items()}


def import_as_run(run_dir: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Publish as the one checkpoint of a new run, with the identity of the run it is of."""
    group = Group()
    facts = dict(note["manifest"])
    step = facts["step"]
    for name in ("files", "folder", "digest"):
        facts.pop(name, None)
    with RunDirectory(run_dir, group) as directory:
        config = note["config"]
        if config:
            # The new run has its checkpoints on disk, wherever the other one had them.
            checkpoint = dict(config.get("checkpoint", {}))
            checkpoint.pop("url", None)
            checkpoint.pop("local_first", None)
            checkpoint.pop("frozen", None)
            write_json(run_dir / "config.json", {**config, "checkpoint": checkpoint})
            write_json(run_dir / "spec.json", note.get("spec", {}))

        def write(folder: Path) -> list[str]:
            return write_tensors(folder, tensors, group)

        publisher = Publisher(run_dir / "checkpoints", RetentionConfig(), group)
        publisher.publish(step, write, facts)
        directory.record_status("imported", step=step)


def write_file(target: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Write a file of safetensors or of torch.save, by its name."""
    with whole_file(target) as file:
        if target.suffix == SAFETENSORS:
            model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
            file.write(save(model, {"format": "pt"}))
        else:
            content = bytearray(json.dumps(note).encode())
            noted = {**nested(tensors), NOTE: torch.frombuffer(content, dtype=torch.uint8)}
            torch.save(noted, file)


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file to write, which replaces `target` at the end of the block.

    UserError if that fails: then `target` is as it was.
    """
    try:
        with replacing(target) as temporary, open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        sync_directory(target.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch raises RuntimeError when the disk is full.
        raise UserError(f"{target} cannot be written: {error}") from error
