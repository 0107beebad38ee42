"""Weights from elsewhere, and checkpoints exported as one file and imported from one.

A .pt file made here has a note beside its tensors: manifest and settings of the run as JSON, in a
tensor of bytes. So it is a checkpoint to resume from.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..distributed import Group
from ..ema import EMA
from ..errors import UserError
from ..files import read_json, replacing, sync_directory, write_json
from ..run.directory import RunDirectory
from .manifest import reading
from .paths import Place, fingerprint_of, release_copies
from .publish import Publisher, RetentionConfig
from .reader import SAFETENSORS, Source, find_checkpoint, open_tensors
from .tensors import Tensors, forms_of, nested
from .writer import write_tensors

MODEL, OPTIMIZER, NOTE = "model", "optimizer", "note"
Weights = Literal["last", "ema"]
FILES = (".pt", ".pth", SAFETENSORS)
OF_ONE_CHECKPOINT = ("step", "files", "folder", "format_version", "digest")  # not for another


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to write, and where."""

    to: Path
    """FILE.pt (torch.save, with the optimizer's state), FILE.safetensors (weights alone), or a
    directory for a run that resumes there"""
    step: int | None = None
    """Step of the checkpoint (default: the newest good one)"""
    source: Path | None = None
    """Another run, checkpoint or exported file than the run of that name"""
    weights: Weights = "last"
    """ema: their average (--optim.ema) in place of the last ones"""


def export(run_dir: Path, options: ExportConfig) -> str:
    """Write a checkpoint as something else, in this one process; a line about what was written.

    Takes as much host memory as the result takes on disk.
    """
    target, where = options.to, options.source or run_dir
    is_file = target.suffix in FILES
    if target.exists() and (is_file or not target.is_dir() or os.listdir(target)):
        raise UserError(f"{target} is there already: give another place, nothing is overwritten")
    if is_file and not target.absolute().parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}")
    if not is_file and target.suffix[1:].isalpha():
        raise UserError(f"{target}: files are {', '.join(FILES)}; a run is a directory")
    path, manifest = find_checkpoint(where, options.step)
    with reading(path):
        source = open_tensors(path, manifest)
        note = note_of(where, path, manifest) or read_note(source)
        if not note:
            raise UserError(
                f"{path} does not say which run and step it is of: only checkpoints and .pt files "
                f"that `export` has made do. Begin a run with its weights: train --init-from {path}"
            )
        if options.step not in (None, step := note["manifest"]["step"]):
            raise UserError(f"{path} is of step {step}, not {options.step}")
        parameters = note["manifest"]["identity"]["parameters"]
        whole = target.suffix != SAFETENSORS
        tensors = read_state(source, parameters, whole, options.weights)
    (write_file if is_file else import_as_run)(target, tensors, note)
    release_copies()
    what = "model and optimizer" if whole else "the model"
    return f"{target}: step {step} from {path}; {len(tensors)} tensors of {what}"


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
    when a tensor has another shape or when nothing fits.
    """
    path, manifest = find_checkpoint(where, step, group)
    opened: list[Source] = []
    first = group.from_first(lambda: fingerprint_of(path))

    def look() -> None:
        opened.append(open_tensors(path, manifest))
        if fingerprint_of(path) != first:
            problem = f"rank {group.rank} sees other files at {path} than rank 0"
            raise UserError(f"{problem}: put it where all see it")

    group.agree(look)
    (source,) = opened
    ours = model.state_dict()
    saved = with_averages(weight_names(source.forms, ours), source, weights)
    common = [name for name in ours if name in saved]
    for name in common:
        if (shape := source.forms[saved[name]].shape) != ours[name].shape:
            raise UserError(f"{path}: {name} is {list(shape)}, wanted {list(ours[name].shape)}")
    if not common:
        raise UserError(f"{path} and this model have no parameter name in common")
    named = dict(model.named_parameters(remove_duplicate=False))
    there = {id(parameter) for name, parameter in named.items() if name in saved}
    # A tied weight has several names, of which one is enough.
    missing = {name for name in ours.keys() - saved.keys() if id(named.get(name)) not in there}
    lists = {"missing there, left as they were": missing}
    lists["there but not wanted"] = saved.keys() - ours.keys()
    texts = [f"{what}: {', '.join(sorted(names))}" for what, names in lists.items() if names]
    if texts and strict:
        raise UserError(f"{path} does not match this model exactly; {'; '.join(texts)}")
    source.read({saved[name]: ours[name] for name in common}, group)
    release_copies()
    return "; ".join([f"{len(common)} tensors from {path}", *texts])


def weight_names(stored: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """The stored names of weights, by the names that a model may have for them.

    Files differ in what they put before a name ("model.", DDP's "module.") or inside (compile's
    "_orig_mod."): the prefix that leaves most of the wanted names is taken off.
    """
    wanted = set(wanted)
    others = (NOTE, f"{OPTIMIZER}.")
    stored = [name for name in stored if name in wanted or not name.startswith(others)]

    def without(prefix: str) -> dict[str, str]:
        inside = ((name.replace("_orig_mod.", ""), name) for name in stored)
        return {n.removeprefix(prefix): full for n, full in inside if n.startswith(prefix)}

    outer = ("", f"{MODEL}.", "state_dict.")
    prefixes = [f"{prefix}{module}" for prefix in outer for module in ("", "module.")]
    return max(map(without, prefixes), key=lambda names: len(names.keys() & wanted))


def with_averages(saved: dict[str, str], source: Source, weights: Weights) -> dict[str, str]:
    """The stored names, of the averages where `weights` says so; UserError if there are none."""
    if weights == "last":
        return saved
    names = {name: f"{OPTIMIZER}.{name}.{EMA}" for name in saved}
    there = {name: full for name, full in names.items() if full in source.forms}
    if not there:
        raise UserError(f"{source.path} has no average of the weights: train with --optim.ema")
    return saved | there


def note_of(where: Place, path: Place, manifest: dict[str, Any]) -> dict[str, Any]:
    """The note for a file made from the checkpoint at `path`, found at `where`: {} if it has none.

    The settings of its run go with it: those beside it on disk, or those in `where` for a store.
    """
    if not manifest:
        return {}
    folder = path.resolve().parent if isinstance(path, Path) else Path(where, "checkpoints")
    config = folder.parent / "config.json"
    known = folder.name == "checkpoints" and config.exists()
    settings = read_json(config) if known else {}
    return {"manifest": {k: v for k, v in manifest.items() if k != "files"}, "config": settings}


def read_note(source: Source) -> dict[str, Any]:
    """The note in a file made here, {} if it has none."""
    if NOTE in source.forms and source.forms[NOTE].dtype == torch.uint8:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            note = json.loads(read_new(source, [NOTE])[NOTE].numpy().tobytes())
            return note if note["manifest"]["identity"] else {}  # or somebody else's tensor
    return {}


def read_state(
    source: Source, parameters: dict[str, Any], optimizer: bool, weights: Weights
) -> Tensors:
    """Model and, if wanted, optimizer of a source, on the host."""
    saved = with_averages(weight_names(source.forms, parameters), source, weights)
    if lost := parameters.keys() - saved.keys():
        raise UserError(f"the source has no {', '.join(sorted(lost)[:3])}: not all of the model")
    names = {f"{MODEL}.{name}": full for name, full in saved.items()}
    if optimizer:
        names |= {full: full for full in source.forms if full.startswith(f"{OPTIMIZER}.")}
    tensors = read_new(source, names.values())
    return {name: tensors[full] for name, full in names.items()}


def read_new(source: Source, names: Iterable[str]) -> Tensors:
    """Tensors of those names, in new memory on the host."""
    forms = {name: source.forms[name] for name in names}
    tensors = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms.items()}
    source.read(tensors, Group())
    return tensors


def model_part(tensors: Tensors) -> Tensors:
    """The tensors of the model, by their names there."""
    start = f"{MODEL}."
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def import_as_run(run_dir: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Publish as the one checkpoint of a new run, with the identity of the run it is of."""
    group, step = Group(), note["manifest"]["step"]
    facts = {k: v for k, v in note["manifest"].items() if k not in OF_ONE_CHECKPOINT}
    facts["identity"] = {**facts["identity"], "parameters": forms_of(model_part(tensors))}
    with RunDirectory(run_dir, group) as directory:
        if config := note["config"]:
            settings = config.get("checkpoint", {})
            here = {k: v for k, v in settings.items() if k not in ("url", "local_first")}
            write_json(run_dir / "config.json", {**config, "checkpoint": here})  # on disk
        publisher = Publisher(run_dir / "checkpoints", RetentionConfig(), group)
        publisher.publish(step, lambda folder: write_tensors(folder, tensors, group), facts)
        directory.record_status("imported", step=step)


def write_file(target: Path, tensors: Tensors, note: dict[str, Any]) -> None:
    """Write a file that is whole or not there, by its name of safetensors or of torch.save."""
    try:
        with replacing(target) as temporary:
            with open(temporary, "xb") as file:
                mode = os.fstat(file.fileno()).st_mode  # safetensors would make it private
                if target.suffix == SAFETENSORS:
                    model = model_part(tensors)
                    save_file(model, temporary, metadata={"format": "pt"})
                else:
                    content = bytearray(json.dumps(note).encode())
                    noted = {**nested(tensors), NOTE: torch.frombuffer(content, dtype=torch.uint8)}
                    torch.save(noted, file)
            os.chmod(temporary, mode)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        sync_directory(target.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch, of a full disk
        raise UserError(f"{target} cannot be written: {error}") from error
