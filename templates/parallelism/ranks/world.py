"""Joining and leaving the ranks of a run; every process is one rank and drives one device.

All environment variables for gloo and NCCL are set here, unless the user has set them. Between
machines only the cluster knows the right network: if the wrong one is chosen, set
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
# Limit of start-up, a validation or a save: a slow disk is no reason to end a run.
PHASE_LIMIT = timedelta(minutes=30)

# Where the ranks of one machine meet (launch.py).
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
# gloo and NCCL accept connections from anybody who can reach them. On one machine only its own
# processes need to.
ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
}

NCCL = {
    # NCCL reports many errors as "unhandled system error", and prints the reason only with this.
    "NCCL_DEBUG": "WARN",
    # The flight recorder keeps the last collectives, each with the line that began it. Since 2.9
    # torch does so by default; watchdog.py relies on it.
    "TORCH_FR_BUFFER_SIZE": "2000",
    # NCCL ends a process that it takes for hung, after 8 minutes: let the watchdog be first.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
}

# gloo connects every rank with every other when a group is made: with fewer ranks than these that
# takes a second or two. From there on it connects two ranks when they first talk.
MANY_RANKS = 128
ON_MANY_RANKS = {"TORCH_GLOO_LAZY_INIT": "1"}
# A rank waits this many seconds for torchrun's signal. torchrun looks for machines that want to
# join ten times a second.
TOLD_WITHIN = 5.0


@dataclass(frozen=True)
class World:
    """This process among the run's processes."""

    rank: int
    size: int
    device: torch.device
    distributed: bool = False
    step_limit: timedelta = PHASE_LIMIT
    """A step that takes longer is a hang (watchdog.py)."""


def launcher() -> str | None:
    """Return a name of the torchrun that started this process, the same for as long as it lives.

    torchrun's own count of restarts leaves out those for a machine that joins.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # The time, which launch.py sets, is part of the name because process numbers are used again.
    since = os.environ.get("LAUNCHER_STARTED", "")
    return f"started by {os.getppid()} ({since}) on {socket.gethostname()}"


def join(config: "ParallelConfig", device_name: str) -> World:
    """Join the process group that torchrun announces; a plain process stays on its own."""
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(0, 1, device)
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        if name not in os.environ:
            raise UserError(f"RANK is set, but not {name}: unset it, or start by ./launch.sh")
    step_limit = timedelta(minutes=config.timeout_minutes)
    if step_limit <= timedelta():
        raise UserError("--parallel.timeout-minutes must be positive")
    die_with_the_launcher()
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks >= MANY_RANKS:
        prefer(ON_MANY_RANKS)
    # A save may hold up a collective for longer than a step may take. When a collective times out,
    # NCCL ends the process without an explanation: let the watchdog be first, which names the rank.
    options: dict[str, Any] = {"timeout": max(PHASE_LIMIT, 2 * step_limit)}
    store: dist.Store | None = None
    # torchrun shares its own store with the ranks, unless launch.sh has started it.
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


def leave(world: World) -> None:
    """Leave the process group, once nothing refers to the model or the optimizer any more."""
    if world.distributed and dist.is_initialized():
        # A DDP reducer that is freed after its group can deadlock the interpreter at exit.
        gc.collect()
        # A fast rank must not close connections that a slow one still uses.
        dist.barrier()
        dist.destroy_process_group()


def regrouping(told_to_stop: Callable[[], bool]) -> bool:
    """Return whether a rank that stops is to be started again, since only another machine leaves.

    In an elastic job (NNODES=1:4), when a machine joins or leaves, torchrun starts all ranks again.
    For one that joins, each torchrun stops its own ranks, one a moment after the other. A rank that
    exited before that would count as finished, which ends the job: so wait for the signal. If none
    comes, another machine was stopped, and this rank continues without it.
    """
    # A range of machines makes a job elastic.
    if ":" not in os.environ.get("NNODES", ""):
        return False
    deadline = time.monotonic() + TOLD_WITHIN
    while not told_to_stop():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


def die_with_the_launcher() -> None:
    """Ask the kernel to end this process when torchrun is killed (Linux; else: watchdog.py)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # torchrun may have been killed before that, while this process imported torch for seconds.
    # The process then has another parent.
    parent = str(os.getppid())
    if os.environ.get("LAUNCHER_PID", parent) != parent:
        sys.exit("the launcher is gone")


def prefer(settings: dict[str, str]) -> None:
    """Set the environment variables that the user has not set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _store_of_torchrun() -> dist.Store | None:
    """Return torchrun's store for this attempt of a job on one machine; None on several.

    The store outlives a restart, and torch uses the same keys in it again: the ranks would read the
    addresses of ranks that are gone, and fail or wait for them.
    """
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        # Each torchrun has a count of its own, so no variable names the attempt on all machines.
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
            log.warning(
                "after a restart the ranks would read torchrun's store of the attempt before, and "
                "fail or hang: start by ./launch.sh, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
                "for torchrun"
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
    """Return the ranks' store of a job on one machine, which rank 0 serves."""
    port = int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {"timeout": PHASE_LIMIT, "wait_for_workers": False}
    if rank == 0:
        # The store would open a socket on all interfaces, so it is given one.
        listener = socket.create_server((LOOPBACK, port), backlog=4096)
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(LOOPBACK, port, **options)
