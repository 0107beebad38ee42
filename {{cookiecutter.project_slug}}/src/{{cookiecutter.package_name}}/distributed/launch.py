"""torchrun, as scripts/launch.sh starts it: on one machine out of reach, and hard of hearing.

Of several stop signals it hears the first one. torchrun hands a signal on to its ranks and waits
for them to save; the same signal once more would end it there and then, and with it the ranks. But
signals come twice by themselves: `timeout` sends one to its child and one to the group. Only Ctrl-C
typed again still means: now. Ended by a signal, it exits with 128 and the signal's number; whether
the ranks have saved is in status.json.

And where one machine is told to stop, the torchruns of the others do not wait long for its own.

A mistake of the user's (exit code 2) is not started again on one machine, where the next start
would refuse it as well. On several it is: where one gives up, torchrun ends the job on all.
"""

import functools
import os
import signal
import sys
import tempfile
import types

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api as launcher

from .network import LOOPBACK, on_loopback, prefer

# The ranks leave together, so their torchruns see it at the same time; one that does not was told
# to stop, and has gone. torchrun would wait 300 s for it, and hear no signal meanwhile.
EXIT_SECONDS = 30
MISTAKE = 2  # exit code of a rank (commands.py)


def mistaken(failures: dict[int, ProcessFailure]) -> bool:
    """Whether some rank says that the user has to mend something, and none crashed.

    The others are ended by torchrun, with SIGTERM.
    """
    codes = {failure.exitcode for failure in failures.values()}
    return MISTAKE in codes and all(code >= 0 or code == -signal.SIGTERM for code in codes)


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts failed ranks again, but for mistakes."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        first = self._remaining_restarts == worker_group.spec.max_restarts
        if first and os.environ.get("NNODES", "1") == "1" and mistaken(result.failures):
            self._remaining_restarts = 0
        return result


def hear_once(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal as torchrun does, and no later one but Ctrl-C."""
    for name in os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(","):
        if name != "SIGINT":
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise api.SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


def on_one_machine(folder: str) -> list[str]:
    """What to tell torchrun so that nothing listens to the network, since nobody has to reach us.

    The processes meet at the loopback address, and torchrun at a file in `folder`, which is its
    user's alone, instead of a store, which would listen to everybody and unpickle what it is sent.
    """
    prefer(on_loopback())
    words = ["--nnodes", "1", "--local-addr", LOOPBACK]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{folder}/store"]
    # Heartbeats are for other machines to see, and the file would grow with each.
    return [*words, "--rdzv-conf", "store_type=file,keep_alive_interval=86400"]


def launch(words: list[str]) -> None:
    """Run torchrun with these words; on this machine alone unless they say --nnodes."""
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as folder:
        run.main(words if "--nnodes" in words else [*on_one_machine(folder), *words])


if __name__ == "__main__":
    api._terminate_process_handler = hear_once
    launcher.LocalElasticAgent = functools.partial(Agent, exit_barrier_timeout=EXIT_SECONDS)
    try:
        launch(sys.argv[1:])
    except ChildFailedError as failed:
        if not mistaken(failed.failures):
            raise
        sys.exit(MISTAKE)  # the ranks have said what it is
    except api.SignalException as stop:
        print(f"torchrun: {stop}", file=sys.stderr)
        sys.exit(128 + stop.sigval)
