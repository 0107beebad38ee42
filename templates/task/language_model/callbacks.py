import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .files import replace_file
from .run.model_state import evaluation_mode
from .sampling import fetch

if TYPE_CHECKING:
    from .config import Config
    from .train import State

log = logging.getLogger(__name__)


def callbacks(config: "Config", run_dir: Path) -> Iterable[Any]:
    """Build the callbacks of a run, in the order in which they are called."""
    return (Sample(run_dir),)


class Sample:
    """Lets the model continue the first validation sample after each validation."""

    harmless = True
    # The number of tokens in the prompt.
    prompt_length = 32
    # The number of tokens to generate, but at most as many as a context has.
    length = 128

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    # Runs eagerly: a compiled model would be compiled again for each length of the text.
    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def after_validation(self, state: "State", figures: dict[str, float]) -> None:
        """Generate text as `infer` does; log it, and write it to a file in samples/."""
        # Imported here, so that an error in infer.py only disables this callback.
        from .infer import InferConfig, decode, generate

        context = state.config.data.context
        options = InferConfig(tokens=min(self.length, context))
        batch = fetch(state.validation, np.array([0]))
        prompt = batch["tokens"][0][: self.prompt_length].tolist()
        # All ranks generate, since the model may be sharded.
        with evaluation_mode(state.module):
            tokens = prompt + list(generate(state.module, prompt, context, options))
        if state.world.rank == 0:
            # Any error here would disable this callback on rank 0 alone. Then the other ranks would
            # wait in `generate` at the next validation.
            try:
                pieces = decode(tokens, state.spec)
                text = b"".join(pieces).decode(errors="replace")
                log.info("sample at step %d: %r", state.step, text)
                folder = self.run_dir / "samples"
                folder.mkdir(exist_ok=True)
                replace_file(folder / f"step_{state.step:08}.txt", text)
            except Exception as error:
                log.warning("the sample of step %d is not saved: %s", state.step, error)
