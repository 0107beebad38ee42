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

import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from .device import move
from .files import replace_file
from .sampling import fetch, fixed_subset

if TYPE_CHECKING:
    from .config import Config

log = logging.getLogger(__name__)


def callbacks(config: "Config", run_dir: Path) -> Iterable[Any]:
    """The callbacks of a run, in the order in which they are called."""
    return (WorstMistakes(run_dir),)


class WorstMistakes:
    """After each validation, a picture of the images on which the model is most wrong.

    Of as many images as a micro-batch has. All processes take part, since the model may be sharded.
    """

    harmless = True
    columns, rows, side = 6, 3, 112  # pixels

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # a batch of another size would be compiled anew
    def after_validation(self, state: Any, figures: dict[str, float]) -> None:
        """Paint them, each with its class and the model's; for the tracker and the report."""
        chosen = fixed_subset(len(state.validation), state.config.train.micro_batch_size)
        batch = move(fetch(state.validation, chosen), state.world.device)
        state.module.eval()
        try:
            logits = state.module(batch["images"]).float()
        finally:
            state.module.train()
        if state.world.rank == 0:
            guesses, labels = logits.argmax(1), batch["labels"]
            losses = F.cross_entropy(logits, labels, reduction="none") * (guesses != labels)
            worst = losses.argsort(descending=True)[: self.columns * self.rows].tolist()
            self.paint(state, batch, guesses, [i for i in worst if losses[i] > 0])

    def paint(self, state: Any, batch: Any, guesses: torch.Tensor, worst: list[int]) -> None:
        """Keep the picture; none where there is no mistake."""
        log.info("mistakes shown at step %d: %d", state.step, len(worst))
        if not worst:
            return
        side, names = self.side, state.spec.classes
        rows = -(-len(worst) // self.columns)
        picture = Image.new("RGB", (self.columns * side, rows * (side + 16)), "white")
        draw = ImageDraw.Draw(picture)
        for place, i in enumerate(worst):
            x, y = place % self.columns * side, place // self.columns * (side + 16)
            pixels = batch["images"][i].mul(255).byte().permute(1, 2, 0).cpu().numpy()
            image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
            picture.paste(image.convert("RGB").resize((side - 4, side - 4), 0), (x + 2, y))
            text = f"{names[batch['labels'][i]]}, not {names[guesses[i]]}"
            draw.text((x + 2, y + side - 3), text, "black")
        picture.save(content := io.BytesIO(), "png")
        (folder := self.run_dir / "samples").mkdir(exist_ok=True)
        replace_file(folder / f"step_{state.step:08}.png", content.getvalue())
