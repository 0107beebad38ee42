"""torchrun as launch.sh starts it: private to one machine, and patient with stop signals.

- On one machine nothing listens to the network, only to the loopback interface.
- Only the first stop signal counts. torchrun hands it on and waits for the ranks to save; the same
  signal again would end torchrun at once, and its ranks, but signals often come twice: `timeout`
  sends one to its child and one to the group. A second Ctrl-C still ends it. Ended by a signal, it
  exits with 128 + the signal's number; whether the ranks have saved is in status.json.
- On several machines a torchrun whose peer was stopped does not wait long for it.
- No rank outlives it: if it is killed, the kernel kills its ranks (world.py).
- An error the user can fix (exit code 2) is not retried on one machine. On several it is, since a
  torchrun that gives up ends the job on all of them.
"""

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
import types
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server import api as agents
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api as launcher

from .stop import TO_BE_RESTARTED
from .world import LOOPBACK, ON_LOOPBACK, die_with_the_launcher, prefer

# All ranks leave together, so the torchruns of all machines see it at the same time, except one
# that was stopped. torchrun would wait 300 s for that one, and react to no signal meanwhile.
EXIT_SECONDS = 30
USER_ERROR = 2  # a rank's exit code
# Lines of torchrun's log that say no more than the ranks, which report stops and errors.
REPEATED = ("Sending process", "Received ", "failed (exitcode: ")


def only_user_errors(failures: dict[int, ProcessFailure]) -> bool:
    """Whether some rank failed for an error the user can fix, and none crashed.

    torchrun itself ends the other ranks, with SIGTERM.
    """
    codes = {failure.exitcode for failure in failures.values()}
    return USER_ERROR in codes and all(code >= 0 or code == -signal.SIGTERM for code in codes)


class Agent(LocalElasticAgent):
    """torchrun's agent; it says which rank ended how, and does not retry what is refused again."""

    def _monitor_workers(self, worker_group: agents.WorkerGroup) -> agents.RunResult:
        monitor: Any = super()._monitor_workers  # decorated without its signature
        result = monitor(worker_group)
        first = self._remaining_restarts == worker_group.spec.max_restarts
        one_machine = os.environ.get("NNODES", "1") == "1"
        if first and one_machine and only_user_errors(result.failures):
            self._remaining_restarts = 0
        elif ended := ", ".join(
            ending(rank, failure)
            for rank, failure in result.failures.items()
            if failure.exitcode != TO_BE_RESTARTED
        ):
            most, left = worker_group.spec.max_restarts, self._remaining_restarts
            again = f": all ranks start again ({most - left + 1} of {most})" if left else ""
            with contextlib.suppress(OSError):  # the console may be closed
                print(f"{ended}{again}", file=sys.stderr, flush=True)
        return result


def ending(rank: int, failure: ProcessFailure) -> str:
    """How the process of a rank ended."""
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    return f"rank {rank} ended with exit code {failure.exitcode}"


def stop_once(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal as torchrun does, and ignore all later ones except Ctrl-C."""
    for name in os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(","):
        if name != "SIGINT":
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise api.SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


def on_one_machine(folder: str) -> list[str]:
    """Options of torchrun for one machine: nothing listens to the network.

    The ranks meet on the loopback interface, and torchrun in a file in `folder`, which only its
    user can read: its own store would listen to everybody and unpickle what it receives.
    """
    prefer(ON_LOOPBACK)
    words = ["--nnodes", "1", "--local-addr", LOOPBACK]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{folder}/store"]
    # Heartbeats are for other machines to see, and the file would grow with each.
    return [*words, "--rdzv-conf", "store_type=file,keep_alive_interval=86400"]


if __name__ == "__main__":
    if os.environ.pop("OF_A_STAGE", ""):  # whose killing must leave nothing behind
        die_with_the_launcher()
    # For the ranks (world.py): this process may be gone before they look who started them.
    os.environ |= {"LAUNCHER_PID": str(os.getpid()), "LAUNCHER_STARTED": f"{time.time():.0f}"}
    api._terminate_process_handler = stop_once
    for logger in (api.logger, agents.logger):
        logger.addFilter(lambda record: not record.getMessage().startswith(REPEATED))
    launcher.LocalElasticAgent = functools.partial(Agent, exit_barrier_timeout=EXIT_SECONDS)
    words = sys.argv[1:]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup; torchrun would take it over
        words = [word.replace("SIGHUP,", "") for word in words]
    try:
        with tempfile.TemporaryDirectory(prefix="rendezvous-") as folder:
            run.main(words if "--nnodes" in words else [*on_one_machine(folder), *words])
    except ChildFailedError as failed:
        if only_user_errors(failed.failures):
            sys.exit(USER_ERROR)  # the ranks have said what it is
        sys.exit(str(failed))  # which rank failed first, and how; no traceback of torchrun
    except api.SignalException as stop:
        with contextlib.suppress(OSError):
            print(f"torchrun: {stop}", file=sys.stderr, flush=True)
        sys.exit(128 + stop.sigval)
