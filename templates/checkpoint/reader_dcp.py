"""Open the tensors of a checkpoint, or of a file or folder of weights in any supported format."""

import os
from typing import Any

from . import DCP_INDEX, WHOLE_FILE, CheckpointError
from .dcp import DcpDirectory
from .paths import Place, local_copy
from .tensors import OneFile, Source


def open_tensors(path: Place, manifest: dict[str, Any]) -> Source:
    """Open a verified checkpoint, or a file or folder of tensors, for which `manifest` is {}.

    Not collective: each rank opens the files for itself. Weights that a checkpoint leaves out are
    read from its base.
    """
    source = open_saved(path, manifest)
    if "base" not in manifest:
        return source
    # Imported here, since few runs have a base.
    from .base import WithBase

    return WithBase(source, manifest)


def open_saved(path: Place, manifest: dict[str, Any]) -> OneFile | DcpDirectory:
    """Open the tensors at `path`, without those that a checkpoint leaves out."""
    local = local_copy(path, manifest).folder
    # This is a file, or a folder of safetensors, which has neither a manifest nor DCP's index.
    if not local.is_dir() or (not manifest and not (local / DCP_INDEX).exists()):
        return OneFile(local)
    # Without a manifest, DCP's index may refer to any file of the folder.
    files = manifest.get("files") or os.listdir(local)
    if WHOLE_FILE in files:
        return OneFile(local / WHOLE_FILE)
    try:
        return DcpDirectory(local, files)
    except CheckpointError:
        # Try once more, since a single bad read of the index must not end a run.
        return DcpDirectory(local, files)
