"""Open the tensors of a checkpoint, or those that anybody has saved in one file."""

from typing import Any

from ..errors import UserError
from . import DCP_INDEX, WHOLE_FILE
from .paths import Place, local_copy
from .tensors import OneFile, Source


def open_tensors(path: Place, manifest: dict[str, Any]) -> Source:
    """Open a verified checkpoint; or, with manifest {}, a file of tensors.

    What a checkpoint leaves out is read from its base.
    """
    source = open_saved(path, manifest)
    if "base" not in manifest:
        return source
    # Few runs have one.
    from .base import WithBase

    return WithBase(source, manifest)


def open_saved(path: Place, manifest: dict[str, Any]) -> OneFile:
    """Open what is in a checkpoint itself."""
    local = local_copy(path, manifest).folder
    if not local.is_dir() or (not manifest and not (local / DCP_INDEX).exists()):
        return OneFile(local)
    if not (local / WHOLE_FILE).exists():
        raise UserError(
            f"{path} was saved in parts, which this project does not read: with the project that "
            "saved it, `export` it as a .pt file"
        )
    return OneFile(local / WHOLE_FILE)
