"""Checkpoints: written, published, verified, read back, exported. Here: their names and errors."""

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import RankError

MANIFEST = "manifest.json"
# The file that torch.save writes.
WHOLE_FILE = "state.pt"
DCP_INDEX = ".metadata"
# The name of the directory with the checkpoint of a step, and what matches such a name.
step_name = "step_{:08d}".format
PUBLISHED = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")


class CheckpointError(RankError):
    """A checkpoint could not be saved, or none could be read."""


@dataclass(frozen=True)
class LocalFiles:
    """A folder that this rank can read a checkpoint's files from, and who else reads them there."""

    folder: Path
    # Index of this rank among the ranks that read the folder, and their number.
    rank: int
    ranks: int
