"""A base: weights that stay frozen, which checkpoints refer to instead of repeating them.

With --checkpoint.frozen no, a checkpoint leaves out each frozen parameter that the files of
--init-from hold. Its manifest says where these files are, with a digest of their contents, and
a reader of the checkpoint takes those parameters from there.
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

# The file of a run directory that remembers digests, since a large base takes minutes to hash.
KNOWN = "base.json"


class Base:
    """The frozen weights of a model that the checkpoints of its run leave out."""

    def __init__(self, model: nn.Module, names: set[str], entry: dict[str, Any]) -> None:
        """`names`: of the parameters that are left out. `entry` goes into each manifest.

        It has the "path" and the "digest" of the files and the names of parameters that are "tied"
        to another one, which is in the files.
        """
        self.model = model
        self.names = names
        self.entry = entry
        self.versions = self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        """Return how often each of the parameters was changed in place."""
        result: dict[str, int] = {}
        for name, parameter in self.model.named_parameters():
            if name in self.names:
                result[name] = parallel.local_part(parameter)._version
        return result

    def require_unchanged(self) -> None:
        """UserError for a parameter that was changed since the start: its values would be lost."""
        for name, version in self._versions_now().items():
            if version != self.versions[name]:
                raise UserError(
                    f"{name} is frozen, but its values have changed, and --checkpoint.frozen no "
                    "does not save them: make it a buffer, or begin the run with "
                    "--checkpoint.frozen all"
                )


def open_base(
    path: Path | None, model: nn.Module, new: tuple[str, ...], run_dir: Path, group: Group
) -> Base:
    """Find the frozen parameters of a model that the weights at `path` have; collective.

    `new`: the parameters, or modules of them, that do not begin with those weights. UserError, on
    every rank, if the files cannot be a base.
    """
    with group.together():
        if path is None:
            raise UserError(
                "--checkpoint.frozen no needs --init-from, the weights that checkpoints leave out"
            )
        if not is_plain_weights(path):
            raise UserError(
                f"--checkpoint.frozen no: {path} is no file or folder of weights. Of a run, make "
                f"one: export --source {path} --to base.safetensors"
            )
        file = OneFile(path)
        rename: Any = getattr(model, "from_transformers", dict)
        if rename(file.forms).keys() != file.forms.keys():
            # Readers of a checkpoint have no model, which alone could rename them.
            raise UserError(
                f"--checkpoint.frozen no: the tensors in {path} have the names of transformers. "
                "Make a file with the names of model.py: train a run with --init-from, and export "
                "it to a .safetensors"
            )
        names, tied = names_of_base(model, file, new)
        if not names:
            raise UserError(
                f"--checkpoint.frozen no: no parameter is both frozen and in {path}. Freeze some "
                "in build_model (requires_grad_(False)), or leave the setting out"
            )
    digest = digest_of(path, run_dir / KNOWN, group)
    return Base(model, names, {"path": str(path.absolute()), "digest": digest, "tied": tied})


def names_of_base(
    model: nn.Module, file: OneFile, new: tuple[str, ...]
) -> tuple[set[str], dict[str, str]]:
    """Return the names of the frozen parameters that a file has, and which of them are tied.

    The latter are in the file under the name of another parameter, to which the dictionary leads.
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
    """Return a manifest with the place where its base is now; collective.

    That is `given` or, without it, the place of when it was saved. `run_dir` remembers digests.
    UserError, on every rank, if there is nothing, or if it has other contents.
    """
    base = manifest["base"]
    path = given or Path(base["path"])
    way_out = "give the place that has them now by --init-from (train) or --base (export, infer)"
    with group.together():
        if not is_plain_weights(path):
            raise UserError(
                f"the checkpoint of step {manifest['step']} leaves out frozen weights, and "
                f"{path}, which had them, is gone: {way_out}"
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

    Each machine reads a version of a file once: `known_file` remembers what it has hashed. Its
    ranks divide the files. UserError, on every rank, if two machines have different contents.
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
            # Without the names, so that a file may be renamed.
            text = json.dumps(sorted(hashes_of_machine[machine].values()))
            digest = hashlib.sha256(text.encode()).hexdigest()
            if known_file is not None and known_file.parent.is_dir():
                # Without it, the next start hashes the files again.
                with contextlib.suppress(OSError, UserError):
                    write_json(known_file, known)
    return group.broadcast(digest)


def hash_file(file: Path, known: dict[str, list[Any]]) -> str:
    """Return the sha256 of a file, out of `known` if that has this version of it; else add it."""
    status = file.stat()
    version = [status.st_size, status.st_mtime_ns]
    name = str(file.resolve())
    if name not in known or known[name][:2] != version:
        with file.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        known[name] = [*version, sha256]
    return known[name][2]


def read_known(known_file: Path | None) -> dict[str, list[Any]]:
    """Return size, time and sha256 of the files that were hashed before; {} if that is unknown."""
    known: dict[str, list[Any]] = {}
    if known_file is None:
        return known
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        for name, (size, time, sha256) in json.loads(known_file.read_bytes()).items():
            known[name] = [int(size), int(time), str(sha256)]
    return known


class WithBase:
    """The tensors of a checkpoint and those that it leaves out, from its base."""

    def __init__(self, checkpoint: Source, manifest: dict[str, Any]) -> None:
        """`manifest`: one that `check_base` has returned."""
        self.path = checkpoint.path
        self.checkpoint = checkpoint
        self.base = OneFile(Path(manifest["base"]["path"]))
        # The names in the base of the tensors that it gives.
        self.stored: dict[str, str] = {}
        self.forms: Tensors = dict(checkpoint.forms)
        # The digest of a manifest is right, but other code may have written something else.
        with reading(checkpoint.path):
            parameters = manifest["identity"]["parameters"]
            left_out = [name for name in parameters if f"model.{name}" not in checkpoint.forms]
            names = weight_names(self.base.forms, parameters)
            for name in left_out:
                stored = names.get(manifest["base"]["tied"].get(name, name))
                if stored is not None:
                    *shape, dtype = parameters[name]
                    # The base may have another dtype than the model, which decides.
                    form = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    self.stored[f"model.{name}"] = stored
                    self.forms[f"model.{name}"] = form

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy values into tensors of the run, as the readers of either do; collective."""
        saved: Tensors = {}
        for name, target in targets.items():
            if name not in self.stored:
                saved[name] = target
        self.checkpoint.read(saved, group)
        # Each tensor by itself, since several may be tied to one.
        for name, stored in self.stored.items():
            if name in targets:
                self.base.read({stored: targets[name]}, group)
