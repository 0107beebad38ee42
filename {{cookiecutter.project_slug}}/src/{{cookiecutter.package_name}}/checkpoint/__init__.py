"""Write, publish, verify, read and export checkpoints; this file has their file names and error."""

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import RankError

MANIFEST = "manifest.json"
# The only file of a checkpoint that torch.save writes.
WHOLE_FILE = "state.pt"
# The index of a checkpoint that torch.distributed.checkpoint (DCP) writes.
DCP_INDEX = ".metadata"
# The name of a step's checkpoint directory, and the pattern of such names. Steps are padded with
# zeros to eight digits.
step_name = "step_{:08d}".format
PUBLISHED = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")


class CheckpointError(RankError):
    """A checkpoint could not be saved, or none could be read."""


@dataclass(frozen=True)
class LocalFiles:
    """A local folder with a checkpoint's files, which one or several ranks read."""

    folder: Path
    # The index of this rank among those that read the folder, and the number of these ranks.
    rank: int
    ranks: int
