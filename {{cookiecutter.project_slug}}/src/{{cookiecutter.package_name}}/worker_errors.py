"""One line for each way in which a machine, or what a dataset holds, fails the loader workers."""

import contextlib
import pickle
import resource
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from .errors import UserError

# Open files that are always enough, where the machine allows them.
OPEN_FILES = 65536
# How deep to look for what cannot be pickled.
DEPTH = 4
# What pickle raises for lambdas, open files and the like.
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def shortage(error: BaseException) -> str:
    """Return a line for an error of too little shared memory or too few open files, else ""."""
    text = str(error)
    without = "or use --train.loader-workers 0"
    if "Too many open files" in text or "ancdata" in text:
        return (
            "too many open files: each tensor that a loader worker sends is one. Raise the limit "
            f"(ulimit -n {OPEN_FILES}), {without}"
        )
    # torch names its files in shared memory so.
    is_shared_file = "</torch_" in text
    if is_shared_file or "out of shared memory" in text or "allocate shared memory" in text:
        return (
            "the shared memory (/dev/shm) is full, through which loader workers send batches. Give "
            f"the container more (docker run --shm-size=8g, or --ipc=host), {without}"
        )
    return ""


def allow_open_files() -> None:
    """Raise this process's soft limit of open files, which is 1,024 by default on most machines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A machine may refuse it all the same.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def start_workers(loader: DataLoader, dataset: Any) -> Any:
    """Start the loader's workers; UserError names what in the dataset cannot be sent to them."""
    allow_open_files()
    try:
        return iter(loader)
    except UNPICKLABLE as error:
        # New processes that are not forked, the default from Python 3.14 on, get it pickled.
        name = unpicklable_part(dataset, type(dataset).__name__, DEPTH)
        if not name:
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the loader workers cannot start, since {name} cannot be pickled: {reason}. Use a "
            "function or a class at the top of a module in place of a lambda, open files in "
            "`__getitem__`, or use --train.loader-workers 0"
        ) from None


def unpicklable_part(value: Any, name: str, depth: int) -> str:
    """Return the dotted name of the innermost part that cannot be pickled; "" if all can be."""
    try:
        pickle.dumps(value)
        return ""
    except UNPICKLABLE:
        pass
    # As for a lock, which may be sent to a process while it starts.
    except Exception:
        return ""
    parts: dict[Any, Any] = {}
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
