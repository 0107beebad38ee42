"""Jobs whose world changes while they run (scripts/launch.sh, NNODES=1:4).

When a machine joins, torchrun has all processes stop (SIGTERM: they save) and starts them again
in the larger world; when one is lost or leaves, those of the others fail, and start in a smaller
one. All goes on from the newest checkpoint, with the same global batches.
"""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

TOLD_WITHIN = 5.0  # seconds; torchrun looks ten times a second for machines that want to join


def outcome(stop: int, control: Any) -> Literal["finished", "preempted", "regrouping"]:
    """How a run has ended for this rank, once all is saved; `stop` is what the ranks agreed on.

    For a machine that joins each of the others tells its own ranks to stop, one a moment after the
    other: a rank that left before it was told would pass for finished, and that ends the job. Where
    nothing is told, only another machine leaves: what stays is "regrouping", to be started again.
    """
    if not stop:
        return "finished"
    deadline = time.monotonic() + TOLD_WITHIN
    while ":" in os.environ.get("NNODES", "") and control.signal is None:
        if time.monotonic() > deadline:
            return "regrouping"
        time.sleep(0.02)
    return "preempted"


def launcher() -> str | None:
    """What has started this process, if torchrun has: one name for as long as that lives.

    torchrun's number of restarts says less: those of a world that grows are not counted.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    pid, began = os.getppid(), ""
    with contextlib.suppress(OSError):  # numbers are used again: on Linux, see when it began
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"started by {pid} ({began}) on {socket.gethostname()}"
