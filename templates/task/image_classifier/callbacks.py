"""Your own callbacks: objects that go along with a run, in every process.

A callback has any of these methods; the loop calls those that are there (train.py):

    before_step(state)                  the batch of the next step is loaded
    after_step(state, record)           a step is done; `record` is its line of metrics.jsonl,
                                        None at steps without one
    after_validation(state, figures)    e.g. {"validation_loss": 1.2}

`state` is train.State: model, optimizer, step, config. A callback may also be a context manager,
entered before the first step and left after the last one. An exception that it raises ends the run,
unless its class sets `harmless = True`: then the exception becomes one warning and the callback is
left out from there on. Figures that it adds to `figures` in the first process are logged with the
others. Random numbers drawn here do not change the steps' own.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config


def callbacks(config: "Config", run_dir: Path) -> Iterable[Any]:
    """The callbacks of a run, in the order in which they are called."""
    return ()
