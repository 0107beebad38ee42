"""Say in one line why loader workers failed: a limit of the machine, or a failure to pickle."""

import contextlib
import pickle
import resource
import time
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from .errors import UserError

# The limit of open files to ask for, which is more than loader workers need.
OPEN_FILES = 65536
# How many levels deep to search for an attribute that cannot be pickled.
DEPTH = 4
# Errors that pickle raises for lambdas, open files and the like.
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def shortage(error: BaseException) -> str:
    """Return a message if the cause is too little shared memory or too few open files, else ""."""
    text = str(error)
    other_way = "or use --train.loader-workers 0"
    # Python reports "0 items of ancdata" for an open file that it could not receive.
    if "Too many open files" in text or "ancdata" in text:
        return (
            "too many open files: each tensor that a loader worker sends opens one. Raise the "
            f"limit (ulimit -n {OPEN_FILES}), {other_way}"
        )
    # The names of torch's files in shared memory begin like this.
    is_shared_file = "</torch_" in text
    if is_shared_file or "out of shared memory" in text or "allocate shared memory" in text:
        return (
            "shared memory (/dev/shm), through which loader workers send batches, is full: give "
            f"the container more (docker run --shm-size=8g, or --ipc=host), {other_way}"
        )
    return ""


def raise_if_a_worker_died() -> None:
    """Raise torch's RuntimeError, which names the signal, if a loader worker has died.

    If a worker dies while this process receives its batch, the connection breaks, and this process
    gets an OSError or EOFError that does not say why.
    """
    # The system may report the end of the worker a moment later.
    for _ in range(10):
        signal_handling._error_if_any_worker_fails()
        time.sleep(0.1)


def allow_open_files() -> None:
    """Raise this process's soft limit of open files, which is 1,024 on most machines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        new_limit = min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        # A machine may still refuse to raise the limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


def start_workers(loader: DataLoader, dataset: Any) -> Any:
    """Start the loader's workers; a UserError names an attribute that cannot be sent to them."""
    allow_open_files()
    try:
        return iter(loader)
    except UNPICKLABLE as error:
        # Workers that are spawned instead of forked receive a pickled copy of the dataset.
        name = unpicklable_part(dataset, type(dataset).__name__, DEPTH)
        # If the whole dataset can be pickled, the error has another cause.
        if not name:
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the loader workers cannot start, since {name} cannot be pickled: {reason}. Replace a "
            "lambda with a function or class at module level, open files in `__getitem__`, or use "
            "--train.loader-workers 0"
        ) from None


def unpicklable_part(value: Any, name: str, depth: int) -> str:
    """Return the dotted name of the innermost value that cannot be pickled; "" if there is none.

    `name` is the name of `value`, whose parts are searched `depth` levels deep.
    """
    try:
        pickle.dumps(value)
        return ""
    except UNPICKLABLE:
        # Search its parts below.
        pass
    except Exception:
        # This does not prove that a worker cannot receive the value. For example, multiprocessing's
        # locks can be pickled while a process is being started, but not here.
        return ""
    if isinstance(value, Mapping):
        parts = {f"[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"[{index}]": part for index, part in enumerate(value)}
    else:
        parts = {f".{key}": part for key, part in getattr(value, "__dict__", {}).items()}
    if depth > 0:
        for key, part in parts.items():
            inner = unpicklable_part(part, f"{name}{key}", depth - 1)
            if inner:
                return inner
    return name
