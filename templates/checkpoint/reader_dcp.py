"""Open the tensors of a checkpoint, or those that anybody has saved, whatever their format."""

import contextlib
import os
from typing import Any

from . import DCP_INDEX, WHOLE_FILE, CheckpointError
from .dcp import DcpDirectory
from .paths import Place, local_copy
from .tensors import OneFile

Source = OneFile | DcpDirectory


def open_tensors(path: Place, manifest: dict[str, Any], rename: Any = dict) -> Source:
    """Open a checkpoint that is verified; or, with manifest {}, a file or directory of tensors."""
    local, *_ = local_copy(path, manifest)
    if not local.is_dir() or (not manifest and not (local / DCP_INDEX).exists()):
        return OneFile(local, rename)
    files = manifest.get("files") or os.listdir(local)
    if WHOLE_FILE in files:
        return OneFile(local / WHOLE_FILE)
    with contextlib.suppress(CheckpointError):  # one wrong read of the index must not end a run
        return DcpDirectory(local, files)
    return DcpDirectory(local, files)
