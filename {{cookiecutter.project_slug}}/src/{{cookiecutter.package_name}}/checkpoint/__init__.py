"""Write, publish, verify, read and export checkpoints.

This file has what these modules share: names of files and directories, and their error.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import RankError

MANIFEST = "manifest.json"
# The file of a checkpoint that torch.save writes. It contains all tensors.
WHOLE_FILE = "state.pt"
# The index of a checkpoint that torch.distributed.checkpoint (DCP) writes.
DCP_INDEX = ".metadata"
# Returns the name of a step's checkpoint directory, such as step_00000120. PUBLISHED matches these
# names, and only these: steps of more than eight digits have no leading zeros.
step_name = "step_{:08d}".format
PUBLISHED = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")


class CheckpointError(RankError):
    """A checkpoint could not be saved, or none could be read."""


@dataclass(frozen=True)
class LocalFiles:
    """A local folder with a checkpoint's files, and the ranks that share the work of reading it."""

    folder: Path
    # The index of this rank among the ranks that read the folder, and the number of these ranks.
    rank: int
    ranks: int
