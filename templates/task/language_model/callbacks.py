"""Your own callbacks: objects that go along with a run, in every process.

A callback has any of these methods; the loop calls those that are there (train.py):

    before_step(state)                  the batch of the next step is loaded
    after_step(state, record)           a step is done; `record` is its line of metrics.jsonl,
                                        None at steps without one
    after_validation(state, figures)    e.g. {"validation_loss": 1.2}

`state` is train.State: model, optimizer, step, config; `state.finish("why")` ends the run. A
callback may be a context manager, entered before the first step and left after the last one. If it
has `state_dict()` and `load_state_dict(state)`, checkpoints store its state as JSON. An exception
in it ends the run, unless its class sets `harmless = True`: then the first one is a warning and
disables the callback. Numbers that it adds to `record` or `figures` in the first process are in
metrics.jsonl and in the tracker, those of `figures` as `validation_<name>`. Random numbers drawn
here do not change the steps' own.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .files import replace_file
from .sampling import fetch

if TYPE_CHECKING:
    from .config import Config

log = logging.getLogger(__name__)


def callbacks(config: "Config", run_dir: Path) -> Iterable[Any]:
    """The callbacks of a run, in the order in which they are called."""
    return (Sample(run_dir),)


class Sample:
    """After each validation, text by the model, which continues the first validation sample."""

    harmless = True
    given, length = 32, 128  # tokens; the latter at most a context

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # the length grows, which would be compiled anew
    def after_validation(self, state: Any, figures: dict[str, float]) -> None:
        """Generate as `infer` does; for the log, the tracker and the report."""
        from .infer import InferConfig, decode, generate

        config = state.config
        options = InferConfig(tokens=min(self.length, config.data.context))
        start = fetch(state.validation, np.array([0]))["tokens"][0, : self.given].tolist()
        state.module.eval()
        try:  # in all processes, since the model may be sharded
            tokens = [*start, *generate(state.module, start, config.data.context, options)]
        finally:
            state.module.train()
        if state.world.rank == 0:
            text = b"".join(decode(tokens, state.spec)).decode(errors="replace")
            log.info("sample at step %d: %r", state.step, text)
            (folder := self.run_dir / "samples").mkdir(exist_ok=True)
            replace_file(folder / f"step_{state.step:08}.txt", text)
