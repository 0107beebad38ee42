"""What fails in an object store now and then: done again, unless it would fail the same way.

A store is throttled, too slow, unwell, or the connection to it is cut. Each attempt comes after a
pause, longer each time and not the same on all ranks, on top of what the store's own client does.
"""

import errno
import logging
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import RankError, UserError

log = logging.getLogger(__name__)
T = TypeVar("T")
PAUSES = (0.5, 2.0, 6.0, 15.0)  # seconds, at most, before each further attempt
PATIENCE = 900.0  # seconds after which there is no further one, where each takes long
LASTING = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError),
    *(pickle.PickleError, UserError),
)
# Of botocore: nothing to wait for, and the store's own checksum of an object.
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
CHECKSUM = "FlexibleChecksumError"


class StoreError(OSError, RankError):
    """A store could not be used, however often it was tried."""


class ChangedError(StoreError):
    """What a store gives is not what was put there, by its own checksum."""


def persistently(action: Callable[[], T], place: Any) -> T:
    """Do what concerns `place`: on a disk once, in a store again while its failure may pass.

    StoreError, with the address, when it does not.
    """
    if isinstance(place, Path):
        return action()
    began, pauses = time.monotonic(), iter(PAUSES)
    while True:
        try:
            return action()
        except LASTING:
            raise
        except Exception as error:
            text = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
            text = text.partition("\n")[0]
            pause = next(pauses, None)
            over = pause is None or time.monotonic() - began > PATIENCE
            if over or type(error).__name__ in NO_CREDENTIALS:
                kind = ChangedError if type(error).__name__ == CHECKSUM else StoreError
                code = getattr(error, "errno", None) or errno.EIO
                raise kind(code, text, str(place)) from error
            log.info("%s: %s; trying again", place, text)
            time.sleep(pause * random.uniform(0.5, 1.0))
