"""Leave frozen weights out of checkpoints, and read them from the files of --init-from instead.

These files are called the base. With --checkpoint.frozen no, a checkpoint leaves out each frozen
parameter that the base contains. The manifest of the checkpoint has the path of the base and a
digest of its contents. Commands that read the checkpoint take the frozen parameters from the base.
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

# The file in a run directory that caches the hashes of the base's files: hashing a large base takes
# minutes.
KNOWN = "base.json"


class Base:
    """The frozen weights that the checkpoints of a run leave out, since the base contains them."""

    def __init__(self, model: nn.Module, names: set[str], entry: dict[str, Any]) -> None:
        """Take the names of the parameters to leave out, and the entry "base" of each manifest.

        The entry has the "path" of the files, the "digest" of their contents, and "tied". A tied
        parameter has several names in the model. "tied" maps each name that the files lack to a
        name that they have, such as {"head.weight": "embedding.weight"}.
        """
        self.model = model
        self.names = names
        self.entry = entry
        # The version counters at the start, with which `require_unchanged` compares.
        self.versions = self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        """Return the version counter of each left-out parameter, which counts in-place changes."""
        result: dict[str, int] = {}
        for name, parameter in self.model.named_parameters():
            if name in self.names:
                result[name] = parallel.local_part(parameter)._version
        return result

    def require_unchanged(self) -> None:
        """Raise UserError if a left-out parameter has changed: no checkpoint has its new values."""
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
    """Open the weights at `path` as the base of a run's checkpoints; collective.

    Checkpoints will leave out the frozen parameters that these weights contain, except those in
    `new` and those outside `may_leave_out` (None: no limit). `new` lists parameters or modules that
    the run does not initialize from these weights. A file in `run_dir` caches the hashes. Raises
    UserError, on every rank, if the files cannot be a base.
    """
    with group.together():
        if path is None:
            raise UserError(
                "--checkpoint.frozen no needs --init-from: the weights to leave out of checkpoints"
            )
        if not is_plain_weights(path):
            raise UserError(
                f"--checkpoint.frozen no: {path} is not a file or a complete folder of weights. If "
                f"it is a run, export its weights: export --source {path} --to base.safetensors"
            )
        file = OneFile(path)
        forms = file.forms
        if hasattr(model, "from_transformers"):
            rename: Any = model.from_transformers
            forms = rename(file.forms)
        if forms.keys() != file.forms.keys():
            # Only the model can map these names to its own names, but `export` reads the base
            # without a model.
            raise UserError(
                f"--checkpoint.frozen no: the tensors in {path} have the names of transformers, "
                "not of model.py. Convert them: train a run with --init-from and export it to a "
                ".safetensors"
            )
        names, tied = names_of_base(model, file, new)
        if may_leave_out is not None:
            names &= may_leave_out
            tied = {name: other for name, other in tied.items() if name in names}
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
    """Return the names of the frozen parameters that a file contains, and the entry "tied".

    A tied parameter has several names in the model, and all of them are returned. "tied" maps each
    name that the file lacks to a name that it has, such as {"head.weight": "embedding.weight"}.
    """
    model_names = shapes_and_dtypes(model).keys()
    # Maps names in the model to names in the file, which may have a prefix.
    stored = weight_names(file.forms, model_names)
    frozen: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and not is_named(name, new):
            frozen.append((name, parameter))
    # Maps each frozen parameter that the file contains to a name that the parameter has in both the
    # model and the file. A tied parameter has several names in the model.
    found_as: dict[nn.Parameter, str] = {}
    for name, parameter in frozen:
        if name in stored and file.forms[stored[name]].shape == parameter.shape:
            found_as[parameter] = name
    names: set[str] = set()
    tied: dict[str, str] = {}
    for name, parameter in frozen:
        if parameter in found_as:
            names.add(name)
            if name not in stored:
                tied[name] = found_as[parameter]
    return names, tied


def is_plain_weights(path: Path) -> bool:
    """Return whether a path is a file, or a complete folder of safetensors that is not a run.

    A folder is incomplete if it lacks a file that its index lists.
    """
    if not path.is_dir():
        return path.is_file()
    # Only the directory of a run has this file.
    if (path / "status.json").exists():
        return False
    files = weight_files(path)
    return bool(files) and all(file.is_file() for file in files)


def check_base(
    manifest: dict[str, Any], given: Path | None, run_dir: Path | None, group: Group
) -> dict[str, Any]:
    """Verify the base of a checkpoint; return the manifest with the current path of the base.

    Collective. The path is `given` or, if that is None, the one in the manifest. A file in
    `run_dir` caches the hashes (None: no cache). Raises UserError, on every rank, if there are no
    weights at the path, or if their contents do not match the digest in the manifest; RankError,
    on every rank, if any rank cannot read them.
    """
    base = manifest["base"]
    path = given or Path(base["path"])
    way_out = "give their path with --init-from (train) or --base (export, infer)"
    with group.together():
        if not is_plain_weights(path):
            problem = "is gone"
            if path.exists():
                problem = "is not a file or a complete folder of weights"
            raise UserError(
                f"the checkpoint of step {manifest['step']} leaves out frozen weights, and "
                f"{path} {problem}: {way_out}"
            )
    # `digest_of` returns the same digest on all ranks, so all of them raise the next error or none.
    digest = digest_of(path, run_dir / KNOWN if run_dir else None, group)
    if digest != base["digest"]:
        raise UserError(
            f"the checkpoint of step {manifest['step']} leaves out frozen weights, and those in "
            f"{path} are not the ones it was trained with: {way_out}"
        )
    return {**manifest, "base": {**base, "path": str(path)}}


def digest_of(path: Path, known_file: Path | None, group: Group) -> str:
    """Return one sha256 for the contents of all files of weights at a path; collective.

    The ranks of a machine divide the files among them, so each machine reads all files.
    `known_file` caches the hashes, so that unchanged files are not read again (None: no cache).
    Raises UserError, on every rank, if the machines have different files, and RankError, on every
    rank, if any rank cannot read a file.
    """
    machine = socket.gethostname()
    # The sha256 of each file that this rank hashes, by the file's name.
    hashes: dict[str, str] = {}
    # The content of the cache, as `read_known` returns it.
    known: dict[str, list[Any]] = {}
    # The entries of the cache for this rank's files. Rank 0 gathers and writes those of all ranks.
    entries: dict[str, list[Any]] = {}
    with group.together():
        known = read_known(known_file)
        files = weight_files(path)
        if group.size > 1:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            files = files[local_rank :: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
        for file in files:
            # This also notes the hash in `known`.
            hashes[file.name] = hash_file(file, known)
            entries[str(file.resolve())] = known[str(file.resolve())]
    gathered = group.gather((machine, hashes, entries))
    digest = ""
    with group.together():
        if group.is_first:
            hashes_of_machine: dict[str, dict[str, str]] = {}
            for machine_of_rank, hashes_of_rank, entries_of_rank in gathered:
                hashes_of_machine.setdefault(machine_of_rank, {}).update(hashes_of_rank)
                known |= entries_of_rank
            hashes_here = hashes_of_machine[machine]
            if any(each != hashes_here for each in hashes_of_machine.values()):
                raise UserError(f"the machines have different files at {path}: copy them again")
            # The names are not hashed, so that a file may be renamed.
            text = json.dumps(sorted(hashes_here.values()))
            digest = hashlib.sha256(text.encode()).hexdigest()
            if known_file is not None and known_file.parent.is_dir():
                # Without the cache, the next start only takes longer.
                with contextlib.suppress(OSError, UserError):
                    write_json(known_file, known)
    return group.broadcast(digest)


def hash_file(file: Path, known: dict[str, list[Any]]) -> str:
    """Return the sha256 of a file, from the cache `known` if the file is unchanged.

    Otherwise read the file and update `known`. A file counts as unchanged if its path, size and
    modification time are the same.
    """
    status = file.stat()
    version = [status.st_size, status.st_mtime_ns]
    name = str(file.resolve())
    if name not in known or known[name][:2] != version:
        with file.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        known[name] = [*version, sha256]
    return known[name][2]


def read_known(known_file: Path | None) -> dict[str, list[Any]]:
    """Read the cache: it maps the path of a file to [size, modification time, sha256].

    An unreadable cache counts as empty. The entries after an invalid one are ignored.
    """
    known: dict[str, list[Any]] = {}
    if known_file is None:
        return known
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        for name, (size, time, sha256) in json.loads(known_file.read_bytes()).items():
            known[name] = [int(size), int(time), str(sha256)]
    return known


class WithBase:
    """The tensors of a checkpoint, and from its base the tensors that the checkpoint leaves out."""

    def __init__(self, checkpoint: Source, manifest: dict[str, Any]) -> None:
        """Open the base; `manifest` must come from `check_base`, which has verified the base."""
        self.path = checkpoint.path
        self.checkpoint = checkpoint
        self.base = OneFile(Path(manifest["base"]["path"]))
        # Maps each left-out tensor, such as "model.norm.weight", to its name in the base.
        self.stored: dict[str, str] = {}
        self.forms: Tensors = dict(checkpoint.forms)
        # A manifest that other code wrote may lack a field, even if its own digest is correct.
        # `reading` turns the KeyError into a CheckpointError.
        with reading(checkpoint.path):
            # Maps each tensor of the model to its shape and dtype, such as [1000, 64, "float32"].
            parameters = manifest["identity"]["parameters"]
            left_out = [name for name in parameters if f"model.{name}" not in checkpoint.forms]
            # Maps names in the model to names in the base.
            names = weight_names(self.base.forms, parameters)
            for name in left_out:
                # If the base lacks this name of a tied parameter, take a name that the base has.
                name_in_base = manifest["base"]["tied"].get(name, name)
                stored = names.get(name_in_base)
                # If the base lacks the tensor, too, it is not in `forms`. Callers then report it.
                if stored is not None:
                    *shape, dtype = parameters[name]
                    # The base may have another dtype. `read` converts its values to the model's.
                    form = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    self.stored[f"model.{name}"] = stored
                    self.forms[f"model.{name}"] = form

    def read(self, targets: Mapping[str, torch.Tensor], group: Group) -> None:
        """Copy values from the checkpoint and the base into tensors of the run.

        Collective. Raises RankError, on every rank, if any rank fails.
        """
        in_checkpoint: Tensors = {}
        for name, target in targets.items():
            if name not in self.stored:
                in_checkpoint[name] = target
        self.checkpoint.read(in_checkpoint, group)
        # Read the tensors one by one. Two names of a tied parameter may map to the same stored
        # name, and one dictionary for all would keep only the last target of a stored name.
        for name, stored in self.stored.items():
            if name in targets:
                self.base.read({stored: targets[name]}, group)
