"""The processes of a run: joining and leaving, agreeing, one control word, stop signals.

Every process drives one device. Host-side agreement (short objects, the control word) goes over
gloo groups of its own, so that it never waits in line behind the device's collectives.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..device import pick_device
from ..errors import UserError
from .network import LOOPBACK, NCCL, PATIENCE, make_room, prefer


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int
    size: int
    device: torch.device
    distributed: bool = False
    step_limit: timedelta = PATIENCE
    """A step that takes longer is a hang (distributed/watchdog.py)."""

    def check_batch(self, samples: int) -> None:
        """UserError when a global batch has no sample for some rank."""
        if samples < self.size:
            raise UserError(
                f"--train.global-batch-size {samples} is below the {self.size} ranks of this run: "
                "raise it or start fewer processes"
            )


def launched_ranks() -> int:
    """Number of processes that torchrun started for this run (1 when it did not start any)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device_name: str, step_limit: timedelta) -> World:
    """Join the process group that torchrun announces; a plain process stays on its own."""
    device = pick_device(device_name)
    if "RANK" not in os.environ:
        return World(0, 1, device)
    if step_limit <= timedelta():
        raise UserError("--parallel.timeout-minutes must be positive")
    die_with_the_launcher()
    make_room(launched_ranks())
    # A save may hold up a collective longer than a step may take, and on NCCL one that is too late
    # takes the process with it, unexplained: watchdog.py is quicker, and names the rank at fault.
    how: dict[str, Any] = {"timeout": max(PATIENCE, 2 * step_limit)}
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun shares its own
    if os.environ["MASTER_ADDR"] == LOOPBACK and not theirs:
        how |= {"rank": int(os.environ["RANK"]), "world_size": launched_ranks()}
        how["store"] = _store_on_loopback(how["rank"])
    if device.type == "cuda":
        prefer(NCCL)
        dist.init_process_group("nccl", device_id=device, **how)
    else:
        dist.init_process_group("gloo", **how)
    return World(dist.get_rank(), dist.get_world_size(), device, True, step_limit)


def _store_on_loopback(rank: int) -> dist.Store:
    """The ranks' store of a job on one machine; left to itself torch's listens to everybody."""
    port, more = int(os.environ["MASTER_PORT"]), {}
    if rank == 0:
        listener = socket.create_server((LOOPBACK, port), backlog=4096)
        more = {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(LOOPBACK, port, timeout=PATIENCE, wait_for_workers=False, **more)


def leave(world: World) -> None:
    """Leave the process group, once nothing refers to the model or the optimizer any more.

    A DDP reducer that outlives its group can deadlock the interpreter on its way out, hence the
    collection; the barrier keeps a fast rank from tearing down what a slow one still uses.
    """
    gc.collect()
    if world.distributed and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def die_with_the_launcher() -> None:
    """Ask the kernel to end this process when torchrun is killed (Linux; else it would live on)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG, launcher = 1, os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Killed while we asked, or even before, while torch was imported, which takes seconds.
        if os.getppid() != launcher or _has_ended(os.environ.get("LAUNCHER_PID")):
            sys.exit("the launcher is gone")


def _has_ended(pid: str | None) -> bool:
    """Whether a process is gone, or dead and its parent has not asked after it yet (Linux)."""
    if pid is None:
        return False
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
