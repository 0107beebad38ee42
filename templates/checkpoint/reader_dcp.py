"""Open the tensors of a checkpoint, or those that anybody has saved, whatever their format."""

import os
from typing import Any

from . import DCP_INDEX, WHOLE_FILE, CheckpointError
from .dcp import DcpDirectory
from .paths import Place, local_copy
from .tensors import OneFile, Source


def open_tensors(path: Place, manifest: dict[str, Any]) -> Source:
    """Open a verified checkpoint; or, with manifest {}, a file or directory of tensors.

    On one rank alone: all ranks open it, each for itself. What a checkpoint leaves out is read from
    its base.
    """
    source = open_saved(path, manifest)
    if "base" not in manifest:
        return source
    # Few runs have one.
    from .base import WithBase

    return WithBase(source, manifest)


def open_saved(path: Place, manifest: dict[str, Any]) -> OneFile | DcpDirectory:
    """Open what is in a checkpoint itself."""
    local = local_copy(path, manifest).folder
    if not local.is_dir() or (not manifest and not (local / DCP_INDEX).exists()):
        return OneFile(local)
    files = manifest.get("files") or os.listdir(local)
    if WHOLE_FILE in files:
        return OneFile(local / WHOLE_FILE)
    try:
        return DcpDirectory(local, files)
    except CheckpointError:
        # One wrong read of the index must not end a run.
        return DcpDirectory(local, files)
