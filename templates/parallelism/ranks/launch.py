"""torchrun as launch.sh starts it: private to one machine, and patient with stop signals.

- On one machine nothing listens to the network, only to the loopback interface.
- Only the first stop signal counts. torchrun hands it on and waits for the ranks to save; the same
  signal again would end torchrun at once, and its ranks, but signals often come twice: `timeout`
  sends one to its child and one to the group. A second Ctrl-C still ends it. Ended by a signal, it
  exits with 128 + the signal's number; whether the ranks have saved is in status.json.
- On several machines a torchrun whose peer was stopped does not wait long for it.
- No rank outlives it: if it is killed, the kernel kills its ranks (world.py).
- An error that would come again is not retried on one machine: one the user can fix (exit code 2),
  or one of the code before the end of the first step (70). On several machines it is, since a
  torchrun that gives up ends the job on all of them.
"""

import contextlib
import logging
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

from ..errors import FAILED_AT_START
from .stop import TO_BE_RESTARTED
from .world import LOOPBACK, ON_LOOPBACK, die_with_the_launcher, prefer

# All ranks leave together, so the torchruns of all machines see it at the same time, except one
# that was stopped. torchrun would wait 300 s for that one, and react to no signal meanwhile.
EXIT_SECONDS = 30
# The exit code of a rank that ended by an error the user can fix.
USER_ERROR = 2
# Beginnings of lines in torchrun's log that repeat what the ranks report of stops and errors.
REPEATED = ("Sending process", "Received ", "failed (exitcode: ")


def failed_with(code: int, failures: dict[int, ProcessFailure]) -> bool:
    """Whether some rank ended with this exit code, and none crashed."""
    for failure in failures.values():
        # torchrun itself ends the other ranks, with SIGTERM. Any other signal is a crash.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return False
    return any(failure.exitcode == code for failure in failures.values())


class Agent(LocalElasticAgent):
    """torchrun's agent, which says how each rank ended, and retries no error that would repeat."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("exit_barrier_timeout", EXIT_SECONDS)
        super().__init__(*arguments, **options)

    def _monitor_workers(self, worker_group: agents.WorkerGroup) -> agents.RunResult:
        # torch has decorated it without its signature.
        monitor: Any = super()._monitor_workers
        result = monitor(worker_group)
        most = worker_group.spec.max_restarts
        left = self._remaining_restarts
        one_machine = os.environ.get("NNODES", "1") == "1"
        if left == most and one_machine and failed_with(USER_ERROR, result.failures):
            # The ranks have reported the error, and would end by it again.
            self._remaining_restarts = 0
            return result
        endings = []
        for rank, failure in result.failures.items():
            if failure.exitcode != TO_BE_RESTARTED:
                endings.append(ending(rank, failure))
        if endings:
            text = ", ".join(endings)
            if left == most and one_machine and failed_with(FAILED_AT_START, result.failures):
                text += ": no restart, as an error before the end of the first step comes again"
                self._remaining_restarts = 0
            elif left:
                text += f": all ranks start again ({most - left + 1} of {most})"
            # The console may be closed.
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)
        return result


def ending(rank: int, failure: ProcessFailure) -> str:
    """Return how the process of a rank ended."""
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    return f"rank {rank} ended with exit code {failure.exitcode}"


def stop_once(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal as torchrun does, and ignore all later ones except Ctrl-C."""
    for name in os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(","):
        if name != "SIGINT":
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise api.SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of torchrun's log says more than the ranks do."""
    return not record.getMessage().startswith(REPEATED)


def on_one_machine(folder: str) -> list[str]:
    """Return options of torchrun for one machine, with which nothing listens to the network.

    The ranks meet on the loopback interface, and torchrun in a file in `folder`, which only its
    user can read: its own store would listen to everybody and unpickle what it receives.
    """
    prefer(ON_LOOPBACK)
    options = ["--nnodes", "1", "--local-addr", LOOPBACK]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{folder}/store"]
    # Heartbeats are for other machines to see, and the file would grow with each.
    options += ["--rdzv-conf", "store_type=file,keep_alive_interval=86400"]
    return options


def change_torchrun() -> None:
    """Let torchrun use the functions and the agent of this file."""
    api._terminate_process_handler = stop_once
    api.logger.addFilter(is_news)
    agents.logger.addFilter(is_news)
    launcher.LocalElasticAgent = Agent


def launch(arguments: list[str]) -> None:
    """Run torchrun with these arguments, on one machine unless they say how many there are."""
    # The parent may ignore SIGHUP, as nohup does; torchrun would handle it all the same.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        arguments = [argument.replace("SIGHUP,", "") for argument in arguments]
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as folder:
        if "--nnodes" not in arguments:
            arguments = [*on_one_machine(folder), *arguments]
        run.main(arguments)


if __name__ == "__main__":
    # A stage of the workflow that is killed must not leave its ranks behind.
    if os.environ.pop("OF_A_STAGE", ""):
        die_with_the_launcher()
    # For the ranks (world.py): this process may be gone before they look who started them.
    os.environ["LAUNCHER_PID"] = str(os.getpid())
    os.environ["LAUNCHER_STARTED"] = f"{time.time():.0f}"
    change_torchrun()
    try:
        launch(sys.argv[1:])
    except ChildFailedError as failed:
        # The ranks have reported an error the user can fix.
        if failed_with(USER_ERROR, failed.failures):
            sys.exit(USER_ERROR)
        # This says which rank failed first, and how; a traceback of torchrun would not help.
        sys.exit(str(failed))
    except api.SignalException as stop:
        with contextlib.suppress(OSError):
            print(f"torchrun: {stop}", file=sys.stderr, flush=True)
        sys.exit(128 + stop.sigval)
