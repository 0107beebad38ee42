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

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .config import Config

log = logging.getLogger(__name__)


def callbacks(config: "Config", run_dir: Path) -> Iterable[Any]:
    """The callbacks of a run, in the order in which they are called; `[Sample()]`, for example."""
    return ()


class Sample:
    """Logs a text by the model after each validation; a sharded model needs all processes."""

    harmless = True

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # the length grows, which would be compiled anew
    def after_validation(self, state: Any, figures: dict[str, float]) -> None:
        """Generate as `infer` does."""
        from .infer import InferConfig, decode, encode, generate

        options = InferConfig(tokens=100)
        prompt = encode(options.prompt, state.spec)
        state.module.eval()
        try:
            tokens = [*prompt, *generate(state.module, prompt, state.config.data.context, options)]
        finally:
            state.module.train()
        text = decode(tokens, state.spec).decode(errors="replace")
        log.info("sample at step %d: %r", state.step, text)
