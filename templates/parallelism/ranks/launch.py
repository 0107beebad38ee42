"""Start torchrun for launch.sh, with changes that keep it local and let ranks save when stopped.

- On one machine torchrun listens only on the loopback interface.
- Only the first stop signal counts: torchrun forwards the signal and waits for the ranks to save.
  By default a second signal ends torchrun and its ranks at once. But signals often come twice:
  `timeout` sends one to its child and one to the process group. A second Ctrl-C still ends torchrun
  at once. After a signal, torchrun exits with 128 + the signal's number; status.json says whether
  the ranks have saved.
- On several machines, torchrun does not wait long for a torchrun that was stopped on another one.
- If torchrun is killed, the kernel kills its ranks (world.py).
- On one machine, torchrun does not restart the ranks if an error of the first attempt would repeat.
  That is an error that the user can fix (exit code 2), or an error in code before the end of the
  first step (70). On several machines torchrun retries after these errors, too, since a torchrun
  that gives up ends the job on all machines.
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
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher import api as launcher

from ..errors import FAILED_AT_START
from .stop import TO_BE_RESTARTED
from .world import LOOPBACK, ON_LOOPBACK, die_with_the_launcher, prefer

# Once its ranks have finished, torchrun waits at most this many seconds for the torchruns of other
# machines. The ranks of all machines exit together, so this is long enough, unless a torchrun was
# stopped and never comes. By default the others would wait 300 s for it, and ignore signals.
EXIT_SECONDS = 30
# The exit code of a rank after an error that the user can fix.
USER_ERROR = 2
# Beginnings of torchrun's log lines that only repeat the ranks' own reports of stops and errors.
REPEATED = ("Sending process", "Received ", "failed (exitcode: ")


def failed_with(code: int, failures: dict[int, ProcessFailure]) -> bool:
    """Return whether a rank ended with exit code `code`, and no rank crashed."""
    for failure in failures.values():
        # A negative exit code is the signal that ended the process. torchrun itself ends the other
        # ranks with SIGTERM; any other signal is a crash.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return False
    return any(failure.exitcode == code for failure in failures.values())


class Agent(LocalElasticAgent):
    """The part of torchrun that starts and watches the ranks of a machine.

    It also prints how ranks ended, and does not restart them after an error that would repeat.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("exit_barrier_timeout", EXIT_SECONDS)
        super().__init__(*arguments, **options)

    def _monitor_workers(self, worker_group: agents.WorkerGroup) -> agents.RunResult:
        # torch's decorator hides the method's signature from type checkers.
        monitor: Any = super()._monitor_workers
        result = monitor(worker_group)
        # `result.failures` is empty while all ranks run.
        allowed = worker_group.spec.max_restarts
        used = allowed - self._remaining_restarts
        one_machine = os.environ.get("NNODES", "1") == "1"
        may_give_up = used == 0 and one_machine
        if may_give_up and failed_with(USER_ERROR, result.failures):
            # The ranks have reported the error, which a restart would repeat.
            self._remaining_restarts = 0
            return result
        endings = []
        for rank, failure in result.failures.items():
            # Ranks that end with TO_BE_RESTARTED have not failed: another machine is leaving.
            if failure.exitcode != TO_BE_RESTARTED:
                endings.append(ending(rank, failure))
        if endings:
            text = ", ".join(endings)
            if may_give_up and failed_with(FAILED_AT_START, result.failures):
                text += ": no restart, since an error before the end of the first step would repeat"
                self._remaining_restarts = 0
            elif used < allowed:
                text += f": restarting all ranks ({used + 1} of {allowed})"
            # The console may be closed.
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)
        elif result.failures:
            # All ranks that have ended so far have ended with TO_BE_RESTARTED. torchrun takes that
            # for a failure, which uses up a restart, so add one.
            self._remaining_restarts += 1
        return result


def ending(rank: int, failure: ProcessFailure) -> str:
    """Describe how the process of a rank ended."""
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    return f"rank {rank} ended with exit code {failure.exitcode}"


def stop_once(number: int, frame: types.FrameType | None) -> None:
    """Raise SignalException, as torchrun's own handler does; ignore later signals except Ctrl-C."""
    for name in os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(","):
        if name != "SIGINT":
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise api.SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of torchrun's log says more than the ranks' own reports."""
    return not record.getMessage().startswith(REPEATED)


def on_one_machine(folder: str) -> list[str]:
    """Return torchrun's options for one machine, so that nothing listens on the network.

    The ranks connect on the loopback interface. torchrun's rendezvous uses a file in `folder`, a
    folder that only this user can read. By default the rendezvous would use a TCP store, which
    listens on all interfaces and unpickles any input.
    """
    prefer(ON_LOOPBACK)
    options = ["--nnodes", "1", "--local-addr", LOOPBACK]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{folder}/store"]
    # Heartbeats are for other machines, and each heartbeat makes the store's file grow. So send
    # one a day.
    options += ["--rdzv-conf", "store_type=file,keep_alive_interval=86400"]
    return options


def change_torchrun() -> None:
    """Make torchrun use the functions and the agent of this file."""
    api._terminate_process_handler = stop_once
    api.logger.addFilter(is_news)
    agents.logger.addFilter(is_news)
    launcher.LocalElasticAgent = Agent


def launch(arguments: list[str]) -> None:
    """Run torchrun with these arguments; without --nnodes, on one machine."""
    # nohup lets this process ignore SIGHUP, but torchrun would handle it. So remove SIGHUP from the
    # list for --signals-to-handle (launch.sh), and the comma before the next signal.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        arguments = [argument.replace("SIGHUP,", "") for argument in arguments]
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as folder:
        if "--nnodes" not in arguments:
            arguments = [*on_one_machine(folder), *arguments]
        run.main(arguments)


if __name__ == "__main__":
    # A stage of the workflow may have started this process. If the stage is killed, this process
    # must end, too. At this point LAUNCHER_PID is still the process id of the stage.
    if os.environ.pop("OF_A_STAGE", ""):
        die_with_the_launcher()
    # The ranks (world.py) use the id of this process to notice that it is gone, and its start time
    # to distinguish it from an earlier process with the same id.
    os.environ["LAUNCHER_PID"] = str(os.getpid())
    os.environ["LAUNCHER_STARTED"] = f"{time.time():.0f}"
    change_torchrun()
    try:
        launch(sys.argv[1:])
    except ChildFailedError as failed:
        # For an error that the user can fix, the report of the ranks is enough.
        if failed_with(USER_ERROR, failed.failures):
            sys.exit(USER_ERROR)
        # The message names the first rank that failed; a traceback of torchrun would not help.
        sys.exit(str(failed))
    except RendezvousConnectionError:
        endpoint = os.environ.get("RDZV_ENDPOINT", "the rendezvous endpoint")
        sys.exit(
            f"error: cannot connect to {endpoint} (RDZV_ENDPOINT): run the same line on that "
            "machine first, and open the port between the machines"
        )
    except RendezvousTimeoutError:
        machines = os.environ.get("NNODES", "1")
        sys.exit(
            f"error: the {machines} machines of NNODES did not meet in time: run the same line, "
            "with the same RDZV_ENDPOINT and RDZV_ID, on each of them"
        )
    except api.SignalException as stop:
        with contextlib.suppress(OSError):
            print(f"torchrun: {stop}", file=sys.stderr, flush=True)
        sys.exit(128 + stop.sigval)
