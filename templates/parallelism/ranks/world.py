"""Join and leave the process group of a run; each process is one rank with one device.

All environment variables that the project sets for gloo and NCCL are in this file. A variable that
the user has set keeps its value. If the libraries choose the wrong network between machines, set
NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or NCCL_IB_HCA.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..device import pick_device
from ..errors import UserError

if TYPE_CHECKING:
    from .parallel import ParallelConfig

log = logging.getLogger(__name__)
# Time limit of the start-up, a save, and each batch of a validation: all may wait for a slow disk.
PHASE_LIMIT = timedelta(minutes=30)

# The address on which the ranks of one machine connect (launch.py).
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
# gloo and NCCL accept connections from anyone who can reach them, so on one machine they use only
# the loopback interface.
ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
}

NCCL = {
    # NCCL reports many errors as "unhandled system error"; this prints the reason.
    "NCCL_DEBUG": "WARN",
    # torch's flight recorder keeps the last 2,000 collectives, each with the line that started it,
    # for watchdog.py. It is on by default since torch 2.9.
    "TORCH_FR_BUFFER_SIZE": "2000",
    # By default torch ends a process whose NCCL threads seem to hang for 8 minutes. The watchdog
    # must end the run first, since it says why.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
}

# From this number of ranks on, gloo connects two ranks only when they first communicate. By default
# it connects all pairs when a group is created; with fewer ranks that takes a second or two.
MANY_RANKS = 128
ON_MANY_RANKS = {"TORCH_GLOO_LAZY_INIT": "1"}
# `regrouping` waits for a signal from torchrun for this many seconds. That is ample, since torchrun
# checks ten times a second whether machines want to join.
TOLD_WITHIN = 5.0


@dataclass(frozen=True)
class World:
    """This process, its device, and the number of processes in the run."""

    rank: int
    size: int
    device: torch.device
    distributed: bool = False
    """Whether there is a process group: under torchrun, even with one process."""
    step_limit: timedelta = PHASE_LIMIT
    """Time limit of a step (watchdog.py)."""


def launcher() -> str | None:
    """Return a unique name of the torchrun process that started this one; None without torchrun.

    The run directory keeps the names of the last start. If a name is the same at the next start,
    torchrun has restarted the ranks; otherwise the job was started again. torchrun's own restart
    count leaves out restarts for a machine that joins.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # The name includes the start time, set by launch.py, since process ids are reused.
    started = os.environ.get("LAUNCHER_STARTED", "")
    return f"started by {os.getppid()} ({started}) on {socket.gethostname()}"


def join(config: "ParallelConfig", device_name: str) -> World:
    """Join torchrun's process group; a process without torchrun becomes the only rank.

    If a rank fails before it joins, the others wait for it, until torchrun ends them.
    """
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(0, 1, device)
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        if name not in os.environ:
            raise UserError(
                f"RANK is set, but {name} is not: unset RANK, or start with ./launch.sh"
            )
    step_limit = timedelta(minutes=config.timeout_minutes)
    if step_limit <= timedelta():
        raise UserError("--parallel.timeout-minutes must be positive")
    die_with_the_launcher()
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks >= MANY_RANKS:
        prefer(ON_MANY_RANKS)
    options: dict[str, Any] = {"timeout": timeout_of_collectives(step_limit)}
    store: dist.Store | None = None
    # torchrun shares its own store with the ranks, unless it was started by launch.sh, which sets
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store_of_torchrun()
    elif os.environ["MASTER_ADDR"] == LOOPBACK:
        store = _store_on_loopback(rank)
    if store:
        options |= {"rank": rank, "world_size": ranks, "store": store}
    if device.type == "cuda":
        prefer(NCCL)
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=device,
        distributed=True,
        step_limit=step_limit,
    )


def timeout_of_collectives(step_limit: timedelta) -> timedelta:
    """Return how long a collective may take before torch ends the process.

    torch does not name the rank that hangs, so the watchdog must end the run first. The watchdog
    waits for the limit of a phase, then up to twice the longest step for the reports of the other
    ranks. A step counts at most as long as `step_limit`.
    """
    return max(PHASE_LIMIT, step_limit) + 2 * step_limit + timedelta(minutes=1)


def leave(world: World) -> None:
    """Leave the process group; call this when nothing refers to the model any more."""
    if world.distributed and dist.is_initialized():
        # Free the model now, in case reference cycles keep it alive. If torch's wrapper of a model
        # is freed after its process group, Python can deadlock at exit.
        gc.collect()
        # A fast rank must not close connections that a slow rank still uses.
        dist.barrier()
        dist.destroy_process_group()


def regrouping(told_to_stop: Callable[[], bool]) -> bool:
    """Return whether this rank must be restarted, since another machine is leaving the job.

    All ranks call this after any rank got a stop signal; `told_to_stop` returns whether this rank
    got one. Ranks may get different results, and do not wait for each other here. An elastic job
    (NNODES=1:4) continues with other ranks when a machine joins or leaves:

    - If a machine joins, each torchrun signals its ranks, at slightly different times, and starts
      them again. A rank that exited before its own signal would count as finished, which would end
      the job. So this function waits for the signal, and then returns False.
    - If another machine was stopped, this rank gets no signal, so the wait ends without one and the
      result is True. The caller then exits with TO_BE_RESTARTED, and torchrun starts this rank
      again, without that machine.
    """
    # Only an elastic job has a range of machines.
    if ":" not in os.environ.get("NNODES", ""):
        return False
    deadline = time.monotonic() + TOLD_WITHIN
    while not told_to_stop():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


def die_with_the_launcher() -> None:
    """Let the kernel kill this process when its parent, such as torchrun, is killed.

    Only Linux can do this. On other systems, watchdog.py ends the ranks.
    """
    if sys.platform == "linux":
        # The value of PR_SET_PDEATHSIG in <linux/prctl.h>.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # The parent may already have been killed while this process was importing torch. Then this
    # process has another parent by now.
    parent = str(os.getppid())
    if os.environ.get("LAUNCHER_PID", parent) != parent:
        sys.exit("error: torchrun, which started this rank, was killed: start the run again")


def prefer(settings: dict[str, str]) -> None:
    """Set each of these environment variables, unless the user has set it."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _store_of_torchrun() -> dist.Store | None:
    """Return torchrun's store, with separate keys for this attempt; None on several machines.

    The store outlives a restart, and torch uses the same keys in each attempt. Without separate
    keys, ranks would read the addresses of ranks that are gone, and fail or wait for them.
    """
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        # There are several machines, and each machine's torchrun counts its own restarts. So no
        # variable can name the attempt: its value must be the same on all machines, and must change
        # with each attempt.
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
            log.warning(
                "after a restart, ranks may read outdated entries in torchrun's store and fail or "
                "hang: start with ./launch.sh, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for "
                "torchrun"
            )
        return None
    prefer(ON_LOOPBACK)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=PHASE_LIMIT,
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _store_on_loopback(rank: int) -> dist.Store:
    """Return the store through which the ranks of one machine connect; rank 0 serves it."""
    port = int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {"timeout": PHASE_LIMIT, "wait_for_workers": False}
    if rank == 0:
        # By default the store listens on all interfaces, so give it a socket on the loopback one.
        listener = socket.create_server((LOOPBACK, port), backlog=4096)
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(LOOPBACK, port, **options)
