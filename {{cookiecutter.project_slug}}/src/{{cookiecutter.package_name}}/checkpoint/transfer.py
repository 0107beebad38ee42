"""Weights from elsewhere, and checkpoints exported as one file and imported from one.

A .pt file made here has a note beside its tensors: manifest and settings of the run as JSON, in a
tensor of bytes. So it is a checkpoint to resume from.
"""

import contextlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn
from torch.export import Dim

from ..distributed import Group
from ..ema import EMA
from ..errors import RankError, UserError, printable
from ..files import fingerprint_files, read_json, replacing, sync_directory, write_json
from ..run.directory import RunDirectory
from ..run.journal import validation_of
from . import DCP_INDEX, MANIFEST, step_name
from .manifest import reading, verify
from .paths import Place, checkpoints_of, damaged, published, release_copies, storage_path
from .publish import Found, Publisher, RetentionConfig, best_by_validation
from .reader import Source, open_tensors
from .tensors import SAFETENSORS, OneFile, Tensors, nested, require_same_identity
from .writer import write_tensors

log = logging.getLogger(__name__)
MODEL, OPTIMIZER, NOTE = "model.", "optimizer.", "note"
Weights = Literal["last", "ema"]
FILES = (".pt", ".pth", SAFETENSORS)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to write, and where."""

    to: Path
    """FILE.pt (torch.save, with the optimizer's state), FILE.safetensors (weights alone), FILE.pt2
    (a program of torch.export), or a directory for a run that resumes there"""
    step: int | None = None
    """Step of the checkpoint (default: the newest good one)"""
    source: Path | None = None
    """Another run, checkpoint or exported file than the run of that name (for .pt2: a run)"""
    weights: Weights = "last"
    """ema: their average (--optim.ema) in place of the last ones"""


def export(run_dir: Path, options: ExportConfig) -> str:
    """Write a checkpoint as something else, in this one process; a line about what was written.

    Takes as much host memory as the result takes on disk, twice as much for safetensors.
    """
    target, where = options.to, options.source or run_dir
    is_file = target.suffix in FILES
    if target.exists() and (is_file or not target.is_dir() or os.listdir(target)):
        raise UserError(f"{target} is there already: give another place, nothing is overwritten")
    if not is_file and (target.suffix[1:].isalpha() or target.name == "hf"):
        kinds = f"files are {', '.join(FILES)}, .pt2; a run is a directory; hf needs text=tokenizer"
        raise UserError(f"{target}: {kinds}")
    path, manifest = find_checkpoint(where, options.step)
    with reading(path):
        source = open_tensors(path, manifest)
        note = make_note(where, path, manifest) if manifest else read_note(source)
        if not note:
            raise UserError(
                f"{path} does not say which run and step it is of: only checkpoints and .pt files "
                f"that `export` has made do. Begin a run with its weights: train --init-from {path}"
            )
        if options.step not in (None, step := note["manifest"]["step"]):
            raise UserError(f"{path} is of step {step}, not {options.step}")
        whole = target.suffix != SAFETENSORS
        parameters = note["manifest"]["identity"]["parameters"]
        tensors = read_state(source, parameters, whole, options.weights)
    (write_file if is_file else import_as_run)(target, tensors, note)
    release_copies()
    what = "model and optimizer" if whole else "the model"
    return f"{target}: step {step} from {path}; {len(tensors)} tensors of {what}"


def summary(run_dir: Path, result: Any) -> list[str]:
    """The lines that sum up a run and where its files are."""
    try:
        directory = checkpoints_of(run_dir)
        paths = published(directory)
        checkpoints = f"checkpoints in {directory}: {len(paths)}"
        if paths:
            checkpoints += f", the newest is {paths[-1].name}"
    except (OSError, RankError, UserError) as error:
        checkpoints = f"checkpoints: cannot be listed now ({error})"
    already_finished = result.status == "already finished"
    if not already_finished:
        checkpoints += f" (training waited {result.blocked_seconds:.2f} s for saves)"
    lines: list[str] = []
    for name, value in validation_of(result.validation).items():
        lines.append(f"{name.replace('_', ' ')}: {value:.4f}")
    lines += [checkpoints, f"everything is in {run_dir}"]
    if already_finished:
        lines.append("to train on: more --train.steps (or epochs); for another run: --name NEW")
    elif result.status == "preempted":
        lines.append("to resume: the same command again")
    return lines


def verified(run_dir: Path) -> tuple[list[str], bool]:
    """A line for each checkpoint of a run, and whether one is damaged."""
    directory = checkpoints_of(storage_path(run_dir))
    checked = {path: verify(path) for path in published(directory)}
    if not checked:
        raise UserError(f"there are no checkpoints in {directory}: train first")
    good = {path: manifest for path, (manifest, problems) in checked.items() if not problems}
    best = best_by_validation({path: manifest["score"] for path, manifest in good.items()})
    lines: list[str] = []
    any_damaged = False
    for path, (_, problems) in checked.items():
        if path in good:
            lines.append(_describe(path, good[path]) + ("  best" if path == best else ""))
        elif path.exists():  # not just pruned
            any_damaged = True
            lines.append(f"{path.name}  DAMAGED  {'; '.join(problems)}")
    for name in damaged(directory):
        lines.append(f"{name}  set aside")
    return lines, any_damaged


def _describe(path: Place, manifest: dict[str, Any]) -> str:
    """A good checkpoint in a line: its size, and the metric that it is ranked by."""
    sizes = [entry["size"] for entry in manifest["files"].values()]
    files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
    line = f"{path.name}  good  {sum(sizes) / 1e6:,.1f} MB in {files}"
    rule, score = manifest["score"]  # as in "min validation_loss"
    if score is not None:
        line += f"  {rule[4:].replace('_', ' ')} {score:.4f}"
    return line


def find_checkpoint(where: Place, step: int | None = None, group: Group | None = None) -> Found:
    """Verify and pick a checkpoint to read from: a run's newest good one, or one by step.

    `where` may also be a checkpoint; or a file of torch.save or safetensors, a folder of the latter
    or of DCP: these have the manifest {}, and are not verified. Nothing is changed.
    """
    group, where = group or Group(), storage_path(where)
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
            return path, manifest
        if path.exists():  # else it was pruned meanwhile
            log.warning("DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
    there = ", ".join(str(int(path.name[5:])) for path in published(checkpoints_of(where)))
    hint = f"there are steps {there}" if there else "train first"
    of_step = f" of step {step}" if step is not None else ""
    raise UserError(f"there is no good checkpoint{of_step} in {where}: {hint}")


def candidates(where: Place, step: int | None) -> tuple[list[Place], bool]:
    """What `find_checkpoint` may take, the best first; and whether these have manifests."""
    if not where.exists():
        raise UserError(f"there is nothing at {where}")
    if (where / MANIFEST).exists():
        return [where], True
    if where.is_file() or (where / DCP_INDEX).exists():
        return [where], False
    directory = checkpoints_of(where)
    if step is not None:
        steps = [directory / step_name(step)]
    else:
        steps = published(directory)[::-1]
    is_a_run = steps or not isinstance(where, Path) or (where / "status.json").exists()
    if not is_a_run and any(where.glob(f"*{SAFETENSORS}")):
        return [where], False
    return steps, True


def load_weights(
    where: Path,
    model: nn.Module,
    step: int | None,
    group: Group,
    strict: bool = False,
    weights: Weights = "last",
) -> str:
    """Load weights alone into a model, from anything that holds some; a line about what was done.

    Tensors that only one side has are left out and listed, or refused when `strict`. UserError also
    when a tensor has another shape or when nothing fits. A model may rename (`from_transformers`).
    """
    path, manifest = find_checkpoint(where, step, group)
    rename = getattr(model, "from_transformers", dict)
    with group.together():
        source = open_tensors(path, manifest, rename)
    files = sorted(file for file in source.path.glob("*") if file.is_file()) or [source.path]
    content = fingerprint_files(source.path, files)
    require_same_identity({f"content of {path}": content}, group)

    ours = model.state_dict()
    saved = with_averages(weight_names(source.forms, ours), source, weights)
    common = [name for name in ours if name in saved]
    for name in common:
        shape = source.forms[saved[name]].shape
        if shape != ours[name].shape:
            raise UserError(f"{path}: {name} is {list(shape)}, wanted {list(ours[name].shape)}")
    if not common:
        raise UserError(f"{path} and this model have no parameter name in common")
    notes: list[str] = []
    missing = _missing_names(model, set(common))
    if missing:
        notes.append(f"missing there, left as they were: {', '.join(missing)}")
    unused = sorted(saved.keys() - ours.keys())
    if unused:
        notes.append(f"there but not wanted: {', '.join(unused)}")
    notes = [printable(note) for note in notes]
    if notes and strict:
        raise UserError(f"{path} does not match this model exactly; {'; '.join(notes)}")
    source.read({saved[name]: ours[name] for name in common}, group)
    release_copies()
    return "; ".join([f"{len(common)} tensors from {path}", *notes])


def _missing_names(model: nn.Module, loaded: set[str]) -> list[str]:
    """The names of a model's tensors that are not loaded; a tied weight is, by any of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    is_loaded = {id(parameters[name]) for name in loaded if name in parameters}
    missing = []
    for name in model.state_dict():
        by_another_name = name in parameters and id(parameters[name]) in is_loaded
        if name not in loaded and not by_another_name:
            missing.append(name)
    return missing


def weight_names(stored: Iterable[str], expected: Iterable[str]) -> dict[str, str]:
    """The stored names of weights, by the names that a model may have for them."""
    # Files differ in what they put before a name ("model.", DDP's "module.") or inside (compile's
    # "_orig_mod."): the prefix that leaves most of the expected names is taken off.
    expected = set(expected)
    candidates: list[str] = []
    for name in stored:
        if name in expected or not name.startswith((NOTE, OPTIMIZER)):
            candidates.append(name)
    best: dict[str, str] = {}
    most = -1
    for outer in ("", MODEL, "state_dict."):
        for prefix in (outer, f"{outer}module."):
            names: dict[str, str] = {}
            for full_name in candidates:
                name = full_name.replace("_orig_mod.", "")
                if name.startswith(prefix):
                    names[name.removeprefix(prefix)] = full_name
            fitting = len(names.keys() & expected)
            if fitting > most:
                best, most = names, fitting
    return best


def with_averages(saved: dict[str, str], source: Source, weights: Weights) -> dict[str, str]:
    """The stored names, of the averages where `weights` says so; UserError if there are none."""
    if weights == "last":
        return saved
    names = {name: f"{OPTIMIZER}{name}.{EMA}" for name in saved}
    averages = {name: full for name, full in names.items() if full in source.forms}
    if not averages:
        raise UserError(f"{source.path} has no average of the weights: train with --optim.ema")
    return saved | averages


def make_note(where: Place, path: Place, manifest: dict[str, Any]) -> dict[str, Any]:
    """The note for a file made from the checkpoint at `path`, found at `where`.

    The settings of its run, and the spec of its data, go with it: those beside it on disk; for a
    store those in `where`. Where there are none, the manifest has the settings.
    """
    run = path.resolve().parent.parent if isinstance(path, Path) else where
    files = {name: Path(f"{run}", f"{name}.json") for name in ("config", "spec")}
    beside = {name: read_json(file) for name, file in files.items() if file.exists()}
    return {"manifest": manifest, "config": manifest["config"], **beside}


def read_note(source: Source) -> dict[str, Any]:
    """The note in a file made here, {} if it has none."""
    if isinstance(source, OneFile) and NOTE in source.forms:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            note = json.loads(source.forms[NOTE].numpy().tobytes())
            return note if note["manifest"]["identity"] else {}  # or somebody else's tensor
    return {}


def read_state(
    source: Source, parameters: dict[str, Any], optimizer: bool, weights: Weights
) -> Tensors:
    """The model and, if wanted, the optimizer of a source, in new memory on the host."""
    model = {n.removeprefix(MODEL): n for n in source.forms if n.startswith(MODEL)}
    if lost := parameters.keys() - model.keys():
        raise UserError(f"the source has no {', '.join(sorted(lost)[:3])}: not all of the model")
    names = {f"{MODEL}{n}": full for n, full in with_averages(model, source, weights).items()}
    if optimizer:
        names |= {full: full for full in source.forms if full.startswith(OPTIMIZER)}
    forms = {full: source.forms[full] for full in names.values()}
    tensors = {full: torch.empty(form.shape, dtype=form.dtype) for full, form in forms.items()}
    source.read(tensors, Group())
    return {name: tensors[full] for name, full in names.items()}


def import_as_run(run_dir: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Publish as the one checkpoint of a new run, with the identity of the run it is of."""
    group, step = Group(), note["manifest"]["step"]
    facts = {k: v for k, v in note["manifest"].items() if k not in ("files", "folder", "digest")}
    with RunDirectory(run_dir, group) as directory:
        if config := note["config"]:
            settings = config.get("checkpoint", {})
            here = {k: v for k, v in settings.items() if k not in ("url", "local_first")}
            write_json(run_dir / "config.json", {**config, "checkpoint": here})  # on disk
            write_json(run_dir / "spec.json", note.get("spec", {}))
        publisher = Publisher(run_dir / "checkpoints", RetentionConfig(), group)
        publisher.publish(step, lambda folder: write_tensors(folder, tensors, group), facts)
        directory.record_status("imported", step=step)


def write_file(target: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Write a file of safetensors or of torch.save, by its name."""

    def write(file: Any) -> None:
        if target.suffix == SAFETENSORS:
            model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
            file.write(save(model, {"format": "pt"}))
        else:
            content = bytearray(json.dumps(note).encode())
            noted = {**nested(tensors), NOTE: torch.frombuffer(content, dtype=torch.uint8)}
            torch.save(noted, file)

    write_whole(target, write)


def write_whole(target: Path, write: Callable[[Any], object]) -> None:
    """Write a file, which is whole or not there; UserError if that fails."""
    try:
        with replacing(target) as temporary, open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(target.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch, of a full disk
        raise UserError(f"{target} cannot be written: {error}") from error


def export_program(target: Path, model: nn.Module, use: Callable[[], object]) -> str:
    """Write a model to FILE.pt2, for inputs of all sizes that it can take; a line about it.

    `use()` calls the model once, and so shows what its inputs are: those arguments of `forward`
    that have no default (targets have one). UserError, with torch's reason, if it has no program.
    """
    signature, calls = inspect.signature(model.forward), []

    def note(_: nn.Module, arguments: Any, by_name: Any) -> None:
        calls.append(signature.bind(*arguments, **by_name).arguments)

    with torch.no_grad(), model.register_forward_pre_hook(note, with_kwargs=True):
        use()
    if not calls:
        raise UserError("compute_loss (model.py) does not call the model itself")
    names = [name for name, each in signature.parameters.items() if each.default is each.empty]
    try:
        # Copied, or the program of a view would check what it is a view of.
        inputs = tuple(calls[0][name].clone() for name in names)
        sizes = [{i: Dim.AUTO if i else Dim.DYNAMIC for i in range(x.ndim)} for x in inputs]
        program = torch.export.export(model, inputs, dynamic_shapes=sizes)
    except Exception as error:  # of many kinds, and with pages of advice
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{target}: torch.export cannot make a program of it: {reason}") from error
    write_whole(target, lambda file: torch.export.save(program, file))
    shapes = [f"{name} {list(each.shape)}" for name, each in zip(names, inputs, strict=True)]
    return f"{target}: the model as a program; its input, by example: {', '.join(shapes)}"
