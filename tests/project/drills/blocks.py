"""Blocks of host work, `Group.together`: what fails on one rank is raised on all at their end.

Usage: blocks.py PACKAGE (by `drill`, on two ranks)
"""

import importlib
import os
import sys
import threading
from typing import Any


def main(package: str) -> None:
    """Let blocks fail in each way."""
    distributed = importlib.import_module(f"{package}.distributed")
    parallel = importlib.import_module(f"{package}.distributed.parallel")
    errors: Any = importlib.import_module(f"{package}.errors")
    world = distributed.join(parallel.ParallelConfig(), "cpu")
    group, rank = distributed.Group(world), world.rank

    def outcome(raised: dict[int, Exception]) -> tuple[str, str]:
        """The error of a block in which these ranks raise these errors."""
        try:
            with group.together():
                if rank in raised:
                    raise raised[rank]
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""

    assert outcome({}) == ("", "")
    for failing in (0, 1):
        told = outcome({failing: ZeroDivisionError("so it is")})
        assert told == ("RankError", f"rank {failing}: ZeroDivisionError: so it is"), told
        told = outcome({failing: errors.UserError("set it")})
        assert told == ("UserError", "set it"), told
    told = outcome({0: OSError(28, "full"), 1: ValueError("odd")})
    assert told == ("RankError", "rank 0: OSError: [Errno 28] full; rank 1: ValueError: odd"), told
    told = outcome({0: ValueError("odd"), 1: ValueError("odd")})
    assert told == ("RankError", "rank 0: ValueError: odd"), told
    told = outcome({0: errors.RankError("gone"), 1: errors.UserError("set it")})
    assert told == ("UserError", "set it"), "the user's error comes first"

    # An error that cannot be pickled, on the rank that has it with its cause.
    unpicklable = type("Local", (Exception,), {"__reduce__": lambda self: 1 / 0})
    try:
        with group.together():
            if rank == 1:
                raise unpicklable("of a library")
    except errors.RankError as error:
        assert str(error) == "rank 1: Local: of a library"
        assert isinstance(error.__cause__, unpicklable) == (rank == 1)

    # Values: rank 0's for all, everybody's for rank 0.
    assert group.broadcast([rank, "x"]) == [0, "x"]
    assert group.gather(rank) == ([0, 1] if rank == 0 else [1])
    assert group.any(rank == 1) and not group.any(False)

    # No collective in a block, whichever rank calls it: the others do not wait for it.
    within = (lambda: group.broadcast(1), lambda: group.gather(1), lambda: group.any(True))
    for call in (*within, lambda: group.together().__enter__(), lambda: nested(group)):
        for callers in ({0}, {1}, {0, 1}):
            try:
                with group.together():
                    if rank in callers:
                        call()
                raise AssertionError("a collective was possible in a block")
            except errors.RankError as error:
                assert f"rank {min(callers)}: RuntimeError: Group." in str(error), error
                assert "must not be in a together() block" in str(error), error
    assert outcome({}) == ("", ""), "a block is possible again"

    # A block in a thread, as the writer's, while the main thread is in one of another group.
    other, seen = distributed.Group(world), list[str]()

    def in_thread() -> None:
        try:
            with other.together():
                if rank == 1:
                    raise OSError(5, "disk")
        except errors.RankError as error:
            seen.append(str(error))

    with group.together():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    assert seen == ["rank 1: OSError: [Errno 5] disk"], seen

    # Ctrl-C leaves at once; the rank that stays finds that the other is gone.
    print(f"rank {rank}: all errors were told", flush=True)
    group.broadcast(None)
    try:
        with group.together():
            if rank == 1:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        os._exit(0)
    except RuntimeError:
        assert rank == 0
        print("rank 0: the other one is gone", flush=True)
        os._exit(0)


def nested(group: Any) -> None:
    """A block in a block."""
    with group.together():
        pass


if __name__ == "__main__":
    main(sys.argv[1])
