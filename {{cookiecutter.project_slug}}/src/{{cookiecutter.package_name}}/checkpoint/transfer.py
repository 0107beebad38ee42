"""Load weights from another run or a file; export a checkpoint to a file or to a new run.

An exported .pt file also has a note: the manifest and settings of the run, as JSON in a tensor of
bytes. With this note, `export` can turn the file into a run again, which `train` then resumes.
"""

import contextlib
import json
import logging
import os
import re
import shutil
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
from .paths import (
    Place,
    checkpoints_of,
    has_files,
    local_copy,
    published,
    release_copies,
    storage_path,
)
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
    weight_files,
    weight_names,
)
from .writer import write_tensors

log = logging.getLogger(__name__)
Weights = Literal["last", "ema"]
Step = int | Literal["best"] | None
# The suffixes of the files that `export` writes (program.py writes .pt2).
FILES = (".pt", ".pth", SAFETENSORS)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The checkpoint to export, and its target."""

    to: Path
    """FILE.pt (torch.save, with optimizer state), FILE.safetensors (weights only), FILE.pt2
    (a torch.export program), or a directory for a run that resumes there"""
    step: Step = None
    """Step of the checkpoint, or "best" by validation (none: the newest good one)."""
    source: Path | None = None
    """Run, checkpoint or exported file to read instead of --name (only a run for a .pt2)."""
    weights: Weights = "last"
    """Weights to write: the last ones, or their EMA (--optim.ema)."""
    base: Path | None = None
    """New path of the frozen weights that --checkpoint.frozen no left out, if they moved."""


def export(run_dir: Path, options: ExportConfig) -> str:
    """Export a checkpoint to `options.to` and return a summary line; runs in a single process.

    Holds the whole result in host memory, and for safetensors a second copy of it.
    """
    target = options.to
    where = options.source or run_dir
    is_file = target.suffix in FILES
    fills_empty_folder = not is_file and target.is_dir() and not os.listdir(target)
    if target.exists() and not fills_empty_folder:
        raise UserError(f"{target} exists and is not overwritten: give another --to, or remove it")
    # A folder named "hf", "model-hf" or the like is meant for transformers. This function does not
    # write such folders.
    is_for_transformers = re.fullmatch(r"(.*[-_.])?hf", target.name)
    # A suffix of letters only, as in run.onnx, means a file. So run.v2 is a directory.
    if not is_file and (target.suffix[1:].isalpha() or is_for_transformers):
        formats = f"{', '.join(FILES)} or .pt2 for a file, and a plain name for a run's directory"
        raise UserError(
            f"--to {target}: unknown format. Use {formats}; hf and …-hf are for transformers, "
            "which needs a project with text=tokenizer"
        )
    with_optimizer = target.suffix != SAFETENSORS
    path, manifest = find_checkpoint(where, options.step, base=options.base)
    with reading(path):
        source = open_tensors(path, manifest)
        note = make_note(where, path, manifest) if manifest else read_note(source)
        if not note:
            raise UserError(
                f"{path} does not say which run and step it comes from; only checkpoints and .pt "
                f"files made by `export` do. Start a run from its weights: train --init-from {path}"
            )
        step = note["manifest"]["step"]
        if options.step not in (None, "best", step):
            raise UserError(
                f"{path} is of step {step}, not {options.step}: give another --source or --step"
            )
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
    """Find a checkpoint to read from, verify it, and return its path and manifest.

    `where` is a checkpoint, or a run in which `step` selects one (None: the newest good one). It
    may also be a file of torch.save or safetensors, or a folder of safetensors or DCP. Such files
    have no manifest, so they are not verified, and {} is returned as their manifest. `base` is the
    new path of the weights that the checkpoint leaves out, if they have moved. Does not move or
    remove any checkpoint. Collective with a `group`: then errors are raised on every rank. Raises
    UserError if no checkpoint is good, and RankError if a rank cannot read one.
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
        log.warning("%s has no manifest: it is used without verification", where)
        # If the files are in an object store, this downloads one copy per machine, for all its
        # ranks.
        local_copy(paths[0], {}, group)
        return paths[0], {}
    for path in paths:
        manifest, problems = verify(path, group)
        if not problems:
            if "base" in manifest:
                # Imported here, since few checkpoints have a base.
                from .base import check_base

                manifest = check_base(manifest, base, run_of(path), group)
            return path, manifest
        # If the checkpoint is gone, do not warn: a run that is still training may have pruned it.
        if path.exists():
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    raise UserError(_why_none_is_good(where, step, paths))


def _why_none_is_good(where: Place, step: Step, tried: list[Place]) -> str:
    """Return why `find_checkpoint` found no good checkpoint, and what to do."""
    if tried == [where]:
        # `where` is a checkpoint, not a run.
        return f"the checkpoint {where} is damaged: give another"
    names = [path.name.removeprefix("step_") for path in published(checkpoints_of(where))]
    if not names:
        return f"there is no checkpoint in {where}: train first"
    steps = ", ".join(str(int(name)) for name in names)
    if step is None:
        return f"no checkpoint in {where} is good: those of steps {steps} are damaged"
    # `step` may also be "best", so take the number from the one path that was tried.
    of_step = int(tried[0].name.removeprefix("step_"))
    return f"there is no good checkpoint of step {of_step} in {where}: there are steps {steps}"


def candidates(where: Place, step: Step) -> tuple[list[Place], bool]:
    """Return the paths for `find_checkpoint` to try in order, and whether they have manifests.

    Only rank 0 calls this; `find_checkpoint` raises its errors on every rank.
    """
    if not where.exists():
        raise UserError(f"{where} does not exist: give the path of a run, checkpoint or file")
    if (where / MANIFEST).exists():
        return [where], True
    if where.is_file() or (where / DCP_INDEX).exists():
        return [where], False
    directory = checkpoints_of(where)
    if step == "best":
        return [best_checkpoint(directory)], True
    if step is not None:
        return [directory / step_name(step)], True
    newest_first = published(directory)[::-1]
    # A run has a status.json, even before its first checkpoint.
    if newest_first or (where / "status.json").exists():
        return newest_first, True
    if published(where):
        raise UserError(f"{where} holds the checkpoints of a run: give the run, {where.parent}")
    # This is not a run. It may be a folder of weights that another library wrote.
    if has_files(where, SAFETENSORS):
        return [where], False
    # There is no checkpoint to try: `find_checkpoint` raises an error that says so.
    return [], True


def best_checkpoint(directory: Place) -> Place:
    """Return the checkpoint with the best validation score; UserError if none has a score."""
    paths = published(directory)
    if not paths:
        raise UserError(f"there is no checkpoint in {directory}: train first")
    scores: dict[Place, Any] = {}
    for path in paths:
        with contextlib.suppress(CheckpointError, OSError):
            scores[path] = read_manifest(path)["score"]
    best = best_by_validation(scores)
    if best is None:
        # The message names the metric of the newest checkpoint's rule. If no manifest could be
        # read, use the default rule.
        newest_rule = "min validation_loss"
        if scores:
            newest_rule, _ = list(scores.values())[-1]
        _, _, metric = newest_rule.partition(" ")
        raise UserError(
            f"no checkpoint in {directory} is the best, since no validation had a number for "
            f"{metric}: give --step a number"
        )
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
    """Load weights into a model from a run, checkpoint or file; return a summary line.

    Collective; an error on any rank is raised on all. The summary lists tensors that only the model
    has, which keep their initial values, and tensors that only the source has, which are ignored.
    With `strict`, both kinds raise UserError. A tensor of another shape always raises UserError,
    and so does a source that shares no name with the model. `new` lists tensors or modules of the
    model that are not loaded. `base` is as in `find_checkpoint`. After an error, some of the
    weights may already be loaded.
    """
    path, manifest = find_checkpoint(where, step, group, base)
    with group.together():
        source = open_tensors(path, manifest)
        # A model that can load the files of transformers has a method `from_transformers`. It
        # gives the tensors in such a file the model's names, and does not change other files.
        if not manifest and isinstance(source, OneFile) and hasattr(model, "from_transformers"):
            rename: Any = model.from_transformers
            with reading(path):
                source.forms = rename(source.forms)
        files = weight_files(source.path)
        if not files:
            # A sharded checkpoint contains no safetensors, so `weight_files` found nothing: use all
            # files of its folder.
            files = sorted(file for file in source.path.iterdir() if file.is_file())
        content = fingerprint_files(source.path, files)
    # Each machine may read its own copy of the files. All copies must be the same.
    require_same_identity({f"content of {path}": content}, group)

    # All ranks now have the same names and shapes, so until `read` is called, a check that fails on
    # one rank fails on all of them.
    ours = model.state_dict()
    left_new = {name for name in ours if is_named(name, new)}
    for each in new:
        if not any(is_named(name, (each,)) for name in ours):
            raise UserError(
                f"--init-new {each}: the model has no tensor or module of that name; "
                "model.state_dict() has the names"
            )
    # Maps names in the model to the names of the stored tensors to load. A stored tensor that the
    # model lacks has an entry, too, under the name that it would have in the model.
    saved = weight_names(source.forms, ours)
    saved = with_averages(saved, source, weights)
    common = [name for name in ours if name in saved and name not in left_new]
    for name in common:
        shape = source.forms[saved[name]].shape
        if shape != ours[name].shape:
            raise UserError(f"{path}: {_other_shape(name, shape, ours[name].shape)}")
    if not common:
        raise UserError(
            f"{path} and this model have no parameter name in common: rename the file's tensors, "
            "or give another file"
        )
    notes: list[str] = []
    missing = [name for name in _missing_names(model, set(common)) if name not in left_new]
    if missing:
        notes.append(f"not in the file, kept as initialized: {_listed(missing)}")
    # `saved` may map several names to one stored tensor, as with peft's adapters. That tensor is
    # unused only if the model has none of these names. A tensor that --init-new leaves out counts
    # as used, so that the summary does not list it as ignored.
    used = {saved[name] for name in ours if name in saved}
    unused = sorted(name for name in saved.keys() - ours.keys() if saved[name] not in used)
    if unused:
        notes.append(f"only in the file, ignored: {_listed(unused)}")
    notes = [printable(note) for note in notes]
    if notes and strict:
        raise UserError(f"{path} does not match this model exactly; {'; '.join(notes)}")
    if left_new:
        notes.append(f"kept as initialized (--init-new): {', '.join(sorted(left_new))}")
    # Several tensors of the model may be loaded from one stored tensor, since a peft adapter copies
    # some weights. It is read into the first of them, and copied from there to the others.
    targets: Tensors = {}
    copies: list[str] = []
    for name in common:
        if saved[name] in targets:
            copies.append(name)
        else:
            targets[saved[name]] = ours[name]
    source.read(targets, group)
    for name in copies:
        ours[name].copy_(targets[saved[name]])
    release_copies()
    return "; ".join([f"{len(common)} tensors from {path}", *notes])


def _listed(names: list[str]) -> str:
    """Join up to ten names with commas, and count the rest."""
    more = len(names) - 10
    if more > 0:
        names = [*names[:10], f"and {more} more"]
    return ", ".join(names)


def _other_shape(name: str, there: torch.Size, here: torch.Size) -> str:
    """Return how a tensor's shape differs from the saved one, and what to do."""
    text = f"{name} has shape {list(there)} in the file and {list(here)} in this model"
    way_out = f"Keep it as build_model initializes it: --init-new {name}"
    has_grown = len(here) == 2 and here[1:] == there[1:] and here[0] > there[0]
    if has_grown:
        text += f", {here[0] - there[0]} more rows (classes, a vocabulary, or positions)"
        way_out += ", or let build_model copy the old rows into it"
    return f"{text}. {way_out}"


def _missing_names(model: nn.Module, loaded: set[str]) -> list[str]:
    """Return the names of a model's tensors that are not loaded.

    A tied weight has several names, and counts as loaded if one of them is in `loaded`.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded_ids = {id(parameters[name]) for name in loaded if name in parameters}
    missing = []
    for name in model.state_dict():
        by_another_name = name in parameters and id(parameters[name]) in loaded_ids
        if name not in loaded and not by_another_name:
            missing.append(name)
    return missing


def with_averages(saved: dict[str, str], source: Source, weights: Weights) -> dict[str, str]:
    """Return `saved` or, if `weights` is "ema", a copy that has the averages instead.

    `saved` maps names in the model to stored names. A tensor without an average, such as a buffer,
    keeps its entry. Raises UserError if there are no averages.
    """
    if weights == "last":
        return saved
    averages: dict[str, str] = {}
    for name in saved:
        average = f"{OPTIMIZER}{name}.{EMA}"
        if average in source.forms:
            averages[name] = average
    if not averages:
        raise UserError(f"{source.path} has no EMA of the weights: train with --optim.ema")
    return saved | averages


def make_note(where: Place, path: Place, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the note for an export of the checkpoint at `path`, which was found in `where`.

    The note contains the checkpoint's manifest, and the run's config.json and spec.json. If there
    is no config.json, it contains the settings in the manifest instead.
    """
    # `run_of` returns None if the checkpoint is not in a run directory on this disk. Then `where`
    # may still be the run.
    run = run_of(path) or where
    manifest = dict(manifest)
    # An export contains all weights, so it needs no base.
    manifest.pop("base", None)
    note = {"manifest": manifest, "config": manifest["config"]}
    for name in ("config", "spec"):
        # If `where` is not a run on this disk, there are no such files.
        file = Path(str(run)) / f"{name}.json"
        if file.exists():
            note[name] = read_json(file)
    return note


def run_of(path: Place) -> Path | None:
    """Return the run directory that contains a checkpoint; None for one elsewhere or in a store."""
    if not isinstance(path, Path):
        return None
    directory = path.resolve().parent
    return directory.parent if directory.name == "checkpoints" else None


def read_note(source: Source) -> dict[str, Any]:
    """Return the note in a file made by `export`; {} if it has none."""
    if not isinstance(source, OneFile) or NOTE not in source.forms:
        return {}
    # A file that `export` did not write may have an unrelated tensor named "note".
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        note = json.loads(source.forms[NOTE].numpy().tobytes())
        if note["manifest"]["identity"]:
            return note
    return {}


def read_state(
    source: Source, parameters: dict[str, Any], with_optimizer: bool, weights: Weights
) -> Tensors:
    """Read the model, and the optimizer if `with_optimizer`, into new host memory.

    `parameters` maps each tensor of the model to its shape and dtype, such as [1000, 64,
    "float32"]. Raises UserError if the source lacks one of these tensors.
    """
    stored: dict[str, str] = {}
    for name in source.forms:
        if name.startswith(MODEL):
            stored[name.removeprefix(MODEL)] = name
    lost = parameters.keys() - stored.keys()
    if lost:
        raise UserError(
            f"{source.path} lacks tensors of the model ({', '.join(sorted(lost)[:3])}): give a "
            "--source with all of them"
        )
    # Maps the names of tensors in the result to their names in the source.
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
    result: Tensors = {}
    for name, stored_name in names.items():
        tensor = tensors[stored_name]
        shape_and_dtype = parameters.get(name.removeprefix(MODEL))
        if name.startswith(MODEL) and shape_and_dtype:
            # The average of a weight is in float32 even if the weight is in half precision: convert
            # it to the weight's dtype.
            dtype = shape_and_dtype[-1]
            tensor = tensor.to(getattr(torch, dtype))
        result[name] = tensor
    return result


def import_as_run(run_dir: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Publish tensors as the only checkpoint of a new run, with the identity of the original run.

    Runs in a single process. After an error, nothing of the new run is left.
    """
    group = Group()
    facts = dict(note["manifest"])
    step = facts["step"]
    # These fields describe the files of the original checkpoint. `publish` sets those of the new
    # one.
    for name in ("files", "folder", "digest"):
        facts.pop(name, None)
    # The settings may be {}: a checkpoint of an earlier release has none, and there may have been
    # no config.json.
    config = dict(note["config"])
    if config:
        # The new run keeps its checkpoints on disk, and they contain all weights.
        checkpoint = dict(config.get("checkpoint", {}))
        for name in ("url", "local_first", "frozen"):
            checkpoint.pop(name, None)
        config["checkpoint"] = checkpoint
        facts["config"] = config

    def write(folder: Path) -> list[str]:
        return write_tensors(folder, tensors, group)

    with RunDirectory(run_dir, group) as directory:
        try:
            if config:
                write_json(run_dir / "config.json", config)
                write_json(run_dir / "spec.json", note.get("spec", {}))
            publisher = Publisher(run_dir / "checkpoints", RetentionConfig(), group)
            publisher.publish(step, write, facts)
        except BaseException:
            # Remove what was written, since it would look like a run that has not begun.
            for name in ("config.json", "spec.json"):
                (run_dir / name).unlink(missing_ok=True)
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
            raise
        directory.record_status("imported", step=step)


def write_file(target: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Write the tensors to a .safetensors file, or with the note to a file of torch.save."""
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
    """Open a file for writing that atomically replaces `target` at the end of the block.

    Raises UserError if writing fails.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        sync_directory(target.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch raises RuntimeError when the disk is full.
        raise UserError(f"{target} cannot be written: {error}") from error
