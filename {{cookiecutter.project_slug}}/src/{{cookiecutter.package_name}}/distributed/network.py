"""What gloo and NCCL are told through the environment, and how long ranks wait: all in one place.

A variable that is set already stays as it is, and what is not named here is as torch and NCCL have
it. Between machines that goes for the network, too, which the cluster alone knows: where the one
that is found is not the right one, set NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or NCCL_IB_HCA.
"""

import functools
import logging
import os
import resource
import sys
from datetime import timedelta
from pathlib import Path

log = logging.getLogger(__name__)

PATIENCE = timedelta(minutes=30)
"""What start-up, a validation or a save may take: a slow disk is no reason to kill a run."""

LOOPBACK = "127.0.0.1"
"""What scripts/launch.sh has the ranks of one machine meet at."""

TRACE = "collectives_rank_"

MANY = 128
"""Ranks from which gloo connects as needed; with fewer all is connected in a second or two."""

GROUPS, OTHERS = 4, 1024
"""Of gloo that a rank is in, and one to spare; descriptors for everything else."""

NCCL = {
    # What NCCL cannot do it says as "unhandled system error"; only so does it print the reason.
    "NCCL_DEBUG": "WARN",
    # The flight recorder keeps the last collectives, each with the line that began it. So does
    # torch from 2.9 on unless told otherwise; distributed/watchdog.py counts on it.
    "TORCH_FR_BUFFER_SIZE": "2000",
    # It is written down when NCCL itself gives up on a collective, which is after `PATIENCE`.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


@functools.cache  # asked at each step
def after(step_limit: timedelta) -> timedelta:
    """How long the ranks' hosts wait for each other while stepping: after distributed/watchdog.py.

    It ends a hang, and says who is to blame, within the limit, 30 s and twice the longest step.
    This is for when its thread hangs as well, say at a disk that went with the machine.
    """
    return min(2 * step_limit + timedelta(minutes=1), max(PATIENCE, 2 * step_limit))


def prefer(settings: dict[str, str]) -> None:
    """Set what the user has not."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def on_loopback() -> dict[str, str]:
    """On one machine nobody else has to reach gloo and NCCL, which listen to whoever does."""
    name = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def traces_in(run_dir: Path) -> dict[str, str]:
    """Where the flight recorder writes: into the run, not the machine's /tmp. Read when it does."""
    return {"TORCH_FR_DUMP_TEMP_FILE": str(run_dir.resolve() / TRACE)}


def make_room(ranks: int) -> None:
    """Prepare this process for a job of `ranks`, before it joins a process group.

    gloo, over which the host sides agree, connects every rank with every other as a group is made:
    a descriptor per rank and group in each process, where 1,024 in all is a common limit; and each
    looks up all others in the ranks' store, whose one thread is then what the start waits for.
    From MANY ranks on gloo connects those that talk to each other, when they first do: rank 0 with
    all, others with a few. Unless TORCH_GLOO_LAZY_INIT is in the environment, and says otherwise.
    """
    if ranks < MANY:
        return
    prefer({"TORCH_GLOO_LAZY_INIT": "1"})
    wanted = OTHERS + GROUPS * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < wanted:
        log.warning(
            "%d ranks may need %d open files in a process, and no more than %d are allowed: have "
            "the hard limit raised (ulimit -H -n)",
            *(ranks, wanted, hard),
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
