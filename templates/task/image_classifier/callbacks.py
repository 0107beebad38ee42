import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from .device import move
from .files import replace_file
from .run.model_state import evaluation_mode
from .sampling import fetch, fixed_subset

if TYPE_CHECKING:
    from .config import Config
    from .train import State

log = logging.getLogger(__name__)


def callbacks(config: "Config", run_dir: Path) -> Iterable[Any]:
    """Build the callbacks of a run, in the order in which they are called."""
    return (WorstMistakes(run_dir),)


class WorstMistakes:
    """After each validation, saves a picture of the images that the model classifies worst.

    Always looks at the same validation images; their number is the micro-batch size.
    """

    # An exception disables this callback instead of ending the run.
    harmless = True
    # The picture has at most this many columns and rows of images.
    columns = 6
    rows = 3
    # Width and height in pixels of an image with its margin, and the height of the text below it.
    side = 112
    text_height = 16

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    # Run a compiled model eagerly here: otherwise it would be compiled again for this batch size.
    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def after_validation(self, state: "State", figures: dict[str, float]) -> None:
        """Draw the images with their true and predicted classes, for the tracker and the report.

        If the model is sharded and one rank fails before or in its forward, the others wait there.
        """
        chosen = fixed_subset(len(state.validation), state.config.train.micro_batch_size)
        batch = move(fetch(state.validation, chosen), state.world.device)
        # All ranks run the model, since it may be sharded.
        with evaluation_mode(state.module):
            logits = state.module(batch["images"]).float()
        if state.world.rank == 0:
            labels = batch["labels"]
            guesses = logits.argmax(dim=1)
            # Correctly classified images get a loss of zero, so that they come last.
            losses = F.cross_entropy(logits, labels, reduction="none") * (guesses != labels)
            worst = losses.argsort(descending=True)[: self.columns * self.rows].tolist()
            mistakes = [index for index in worst if losses[index] > 0]
            log.info("mistakes shown at step %d: %d", state.step, len(mistakes))
            # Catch any error, since an error here would disable this callback on rank 0 alone. Then
            # the other ranks would wait for rank 0 in the model after the next validation.
            try:
                if mistakes:
                    self.paint(state, batch, guesses, mistakes)
            except Exception as error:
                log.warning("the picture of step %d is not saved: %s", state.step, error)

    def paint(self, state: "State", batch: Any, guesses: Tensor, mistakes: list[int]) -> None:
        """Save the picture of the mistakes."""
        names = state.spec.classes
        # Divide, and round up.
        rows = -(-len(mistakes) // self.columns)
        cell_height = self.side + self.text_height
        picture = Image.new("RGB", (self.columns * self.side, rows * cell_height), "white")
        draw = ImageDraw.Draw(picture)
        for cell, index in enumerate(mistakes):
            row, column = divmod(cell, self.columns)
            x = column * self.side
            y = row * cell_height
            # A margin of 2 pixels on the left and on the right.
            size = (self.side - 4, self.side - 4)
            image = to_image(batch["images"][index]).resize(size, Image.Resampling.NEAREST)
            picture.paste(image, (x + 2, y))
            text = f"{names[batch['labels'][index]]}, not {names[guesses[index]]}"
            draw.text((x + 2, y + self.side - 3), text, "black")
        content = io.BytesIO()
        picture.save(content, "png")
        folder = self.run_dir / "samples"
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"step_{state.step:08}.png", content.getvalue())


def to_image(pixels: Tensor) -> Image.Image:
    """Convert a grey or colour tensor [channels, height, width] in 0 ... 1 to an RGB image."""
    array = pixels.mul(255).byte().permute(1, 2, 0).cpu().numpy()
    if array.shape[2] == 1:
        array = array.squeeze(2)
    return Image.fromarray(array).convert("RGB")
