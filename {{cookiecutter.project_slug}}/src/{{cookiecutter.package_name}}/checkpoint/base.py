"""Leave frozen weights out of checkpoints, which then refer to the files that hold them: the base.

With --checkpoint.frozen no, a checkpoint leaves out each frozen parameter that is in the files of
--init-from. Its manifest names these files and a digest of their contents, and a reader takes the
parameters from there.
"""

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import Group, parallel
from ..errors import UserError
from ..files import write_json
from .manifest import reading
from .tensors import (
    OneFile,
    Source,
    Tensors,
    is_named,
    shapes_and_dtypes,
    weight_files,
    weight_names,
)

# This file of a run directory caches digests, since hashing a large base takes minutes.
KNOWN = "base.json"


class Base:
    """The frozen weights of a model that the checkpoints of its run leave out."""

    def __init__(self, model: nn.Module, names: set[str], entry: dict[str, Any]) -> None:
        """Take the names of the parameters that are left out, and an entry for each manifest.

        The entry has the "path" and the "digest" of the files, and maps the names of "tied"
        parameters to the names that the files have for them.
        """
        self.model = model
        self.names = names
        self.entry = entry
        self.versions = self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        """Return torch's version counter of each parameter, which counts in-place changes."""
        result: dict[str, int] = {}
        for name, parameter in self.model.named_parameters():
            if name in self.names:
                result[name] = parallel.local_part(parameter)._version
        return result

    def require_unchanged(self) -> None:
        """Raise UserError if a parameter has changed since the start: its values would be lost."""
        for name, version in self._versions_now().items():
            if version != self.versions[name]:
                raise UserError(
                    f"{name} is frozen, but its values have changed, and --checkpoint.frozen no "
                    "does not save them: make it a buffer, or start the run with "
                    "--checkpoint.frozen all"
                )


def open_base(
    path: Path | None,
    model: nn.Module,
    new: tuple[str, ...],
    run_dir: Path,
    group: Group,
    may_leave_out: set[str] | None = None,
) -> Base:
    """Find the frozen parameters of a model that are in the weights at `path`; collective.

    `new` lists the parameters or modules that are not initialized from those weights. Parameters
    outside `may_leave_out` (None: no limit) are not taken. Raises UserError, on every rank, if the
    files cannot be a base.
    """
    with group.together():
        if path is None:
            raise UserError(
                "--checkpoint.frozen no needs --init-from: the weights to leave out of checkpoints"
            )
        if not is_plain_weights(path):
            raise UserError(
                f"--checkpoint.frozen no: {path} is not a file or folder of weights. If it is a "
                f"run, export its weights: export --source {path} --to base.safetensors"
            )
        file = OneFile(path)
        rename: Any = getattr(model, "from_transformers", dict)
        if rename(file.forms).keys() != file.forms.keys():
            # Only the model can rename them, and readers of a checkpoint have no model.
            raise UserError(
                f"--checkpoint.frozen no: the tensors in {path} have the names of transformers, "
                "not of model.py. Convert them: train a run with --init-from and export it to a "
                ".safetensors"
            )
        names, tied = names_of_base(model, file, new)
        if may_leave_out is not None:
            names &= may_leave_out
            tied = {name: there for name, there in tied.items() if name in names}
        if not names:
            raise UserError(
                f"--checkpoint.frozen no: no frozen parameter is in {path}. Freeze some in "
                "build_model (requires_grad_(False)), or leave the setting out"
            )
    digest = digest_of(path, run_dir / KNOWN, group)
    return Base(model, names, {"path": str(path.absolute()), "digest": digest, "tied": tied})


def names_of_base(
    model: nn.Module, file: OneFile, new: tuple[str, ...]
) -> tuple[set[str], dict[str, str]]:
    """Return the names of the frozen parameters that a file has, and the tied ones among them.

    The file has a tied parameter under another name, to which the dictionary maps. Not collective.
    """
    stored = weight_names(file.forms, shapes_and_dtypes(model))
    frozen: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and not is_named(name, new):
            frozen.append((name, parameter))
    name_there: dict[nn.Parameter, str] = {}
    for name, parameter in frozen:
        if name in stored and file.forms[stored[name]].shape == parameter.shape:
            name_there[parameter] = name
    names: set[str] = set()
    tied: dict[str, str] = {}
    for name, parameter in frozen:
        if parameter in name_there:
            names.add(name)
            if name not in stored:
                tied[name] = name_there[parameter]
    return names, tied


def is_plain_weights(path: Path) -> bool:
    """Tell whether a path is a file of weights, or a folder of safetensors that is not a run."""
    if path.is_dir():
        return bool(weight_files(path)) and not (path / "status.json").exists()
    return path.is_file()


def check_base(
    manifest: dict[str, Any], given: Path | None, run_dir: Path | None, group: Group
) -> dict[str, Any]:
    """Return a manifest with the current path of its base; collective.

    That is `given` or, without it, the saved path. `run_dir` caches digests. Raises UserError, on
    every rank, if there are no weights at the path or their contents differ.
    """
    base = manifest["base"]
    path = given or Path(base["path"])
    way_out = "give their path with --init-from (train) or --base (export, infer)"
    with group.together():
        if not is_plain_weights(path):
            raise UserError(
                f"the checkpoint of step {manifest['step']} leaves out frozen weights, and "
                f"{path}, which held them, is gone: {way_out}"
            )
    digest = digest_of(path, run_dir / KNOWN if run_dir else None, group)
    if digest != base["digest"]:
        raise UserError(
            f"the checkpoint of step {manifest['step']} leaves out frozen weights, and those in "
            f"{path} are not the ones it was trained with: {way_out}"
        )
    return {**manifest, "base": {**base, "path": str(path)}}


def digest_of(path: Path, known_file: Path | None, group: Group) -> str:
    """Return a sha256 of the contents of all files of weights at a path; collective.

    The ranks of a machine divide the files among them. `known_file` caches the hashes, so each
    version of a file is read once. Raises UserError, on every rank, if the contents differ between
    machines.
    """
    machine = socket.gethostname()
    hashes: dict[str, str] = {}
    known: dict[str, list[Any]] = {}
    with group.together():
        known = read_known(known_file)
        files = weight_files(path)
        if group.size > 1:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            files = files[local_rank :: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
        for file in files:
            hashes[file.name] = hash_file(file, known)
    gathered = group.gather((machine, hashes, known))
    digest = ""
    with group.together():
        if group.is_first:
            hashes_of_machine: dict[str, dict[str, str]] = {}
            for name, of_rank, known_there in gathered:
                hashes_of_machine.setdefault(name, {}).update(of_rank)
                known |= known_there
            if any(each != hashes_of_machine[machine] for each in hashes_of_machine.values()):
                raise UserError(f"the machines have different files at {path}: copy them again")
            # The names are not hashed, so that a file may be renamed.
            text = json.dumps(sorted(hashes_of_machine[machine].values()))
            digest = hashlib.sha256(text.encode()).hexdigest()
            if known_file is not None and known_file.parent.is_dir():
                # If this fails, the next start only hashes the files again.
                with contextlib.suppress(OSError, UserError):
                    write_json(known_file, known)
    return group.broadcast(digest)


def hash_file(file: Path, known: dict[str, list[Any]]) -> str:
    """Return the sha256 of a file; `known` caches it by path, size and time."""
    status = file.stat()
    version = [status.st_size, status.st_mtime_ns]
    name = str(file.resolve())
    if name not in known or known[name][:2] != version:
        with file.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        known[name] = [*version, sha256]
    return known[name][2]


def read_known(known_file: Path | None) -> dict[str, list[Any]]:
    """Return size, time and sha256 of each file hashed before; {} if the cache cannot be read."""
    known: dict[str, list[Any]] = {}
    if known_file is None:
        return known
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        for name, (size, time, sha256) in json.loads(known_file.read_bytes()).items():
            known[name] = [int(size), int(time), str(sha256)]
    return known


class WithBase:
    """The tensors of a checkpoint, and from its base those that it leaves out."""

    def __init__(self, checkpoint: Source, manifest: dict[str, Any]) -> None:
        """Combine both; `manifest` must come from `check_base`."""
        self.path = checkpoint.path
        self.checkpoint = checkpoint
        self.base = OneFile(Path(manifest["base"]["path"]))
        # For each tensor that the base provides, its name there.
        self.stored: dict[str, str] = {}
        self.forms: Tensors = dict(checkpoint.forms)
        # Even a manifest with a correct digest may come from other code and lack a field.
        with reading(checkpoint.path):
            parameters = manifest["identity"]["parameters"]
            left_out = [name for name in parameters if f"model.{name}" not in checkpoint.forms]
            names = weight_names(self.base.forms, parameters)
            for name in left_out:
                stored = names.get(manifest["base"]["tied"].get(name, name))
                if stored is not None:
                    *shape, dtype = parameters[name]
                    # The base may have another dtype; the model's is used.
                    form = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    self.stored[f"model.{name}"] = stored
                    self.forms[f"model.{name}"] = form

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy the saved values into tensors of the run; collective."""
        saved: Tensors = {}
        for name, target in targets.items():
            if name not in self.stored:
                saved[name] = target
        self.checkpoint.read(saved, group)
        # Tensors are read one by one, since several may be tied to the same one.
        for name, stored in self.stored.items():
            if name in targets:
                self.base.read({stored: targets[name]}, group)
