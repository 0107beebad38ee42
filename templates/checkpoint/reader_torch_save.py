"""Open the tensors of a checkpoint, or of a file or folder of weights from anywhere."""

from typing import Any

from ..errors import UserError
from . import DCP_INDEX, WHOLE_FILE
from .paths import Place, local_copy
from .tensors import OneFile, Source


def open_tensors(path: Place, manifest: dict[str, Any]) -> Source:
    """Open a verified checkpoint, or a file or folder of tensors, for which `manifest` is {}.

    Weights that a checkpoint leaves out are read from its base.
    """
    source = open_saved(path, manifest)
    if "base" not in manifest:
        return source
    # Imported here, since few runs have a base.
    from .base import WithBase

    return WithBase(source, manifest)


def open_saved(path: Place, manifest: dict[str, Any]) -> OneFile:
    """Open the tensors at `path`, without those that a checkpoint leaves out."""
    local = local_copy(path, manifest).folder
    # This is a file, or a folder of safetensors, which has neither a manifest nor DCP's index.
    if not local.is_dir() or (not manifest and not (local / DCP_INDEX).exists()):
        return OneFile(local)
    if not (local / WHOLE_FILE).exists():
        raise UserError(
            f"{path} is a sharded checkpoint, which this project does not read: `export` it to a "
            ".pt file with the project that saved it"
        )
    return OneFile(local / WHOLE_FILE)
