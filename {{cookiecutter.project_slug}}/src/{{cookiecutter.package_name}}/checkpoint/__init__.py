"""Checkpoints: written, published, verified, read back, exported. Here: their names and errors."""

import re

from ..errors import RankError

MANIFEST = "manifest.json"
WHOLE_FILE = "state.pt"  # of torch.save
DCP_INDEX = ".metadata"
step_name = "step_{:08d}".format  # the directory that holds the checkpoint of a step
PUBLISHED = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")  # what `step_name` makes


class CheckpointError(RankError):
    """A checkpoint could not be saved, or none could be read."""
