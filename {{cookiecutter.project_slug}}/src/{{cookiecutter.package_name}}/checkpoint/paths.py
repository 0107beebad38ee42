"""A stand-in: where the checkpoints of a run are."""

from .manifest import published
from .publish import checkpoints_of

__all__ = ["checkpoints_of", "published"]
