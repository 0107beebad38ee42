"""torchrun, as scripts/launch.sh starts it: of several stop signals it hears the first one.

torchrun hands a signal on to its ranks and waits for them to save; the same signal once more would
end it there and then, and with it the ranks. But signals come twice by themselves: `timeout` sends
one to its child and one to the group. Only Ctrl-C typed again still means: now. Ended by a signal,
it exits with 128 and the signal's number; whether the ranks have saved is in status.json.
"""

import os
import signal
import sys
import types

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import api


def hear_once(number: int, frame: types.FrameType | None) -> None:
    """Handle a signal as torchrun does, and no later one but Ctrl-C."""
    for name in os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(","):
        if name != "SIGINT":
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise api.SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


if __name__ == "__main__":
    api._terminate_process_handler = hear_once
    try:
        run.main()
    except api.SignalException as stop:
        print(f"torchrun: {stop}", file=sys.stderr)
        sys.exit(128 + stop.sigval)
