"""What the tests know of each task: a new answer to the question needs its line here, and no other.

The reference is by hand (project/plain_loop.py): a loss, and what reads the data that `make_data`
writes. The reading returns the training and the validation samples, and a `batch` the samples of
some numbers, augmented by their keys.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.project import plain_loop


@dataclass(frozen=True)
class Task:
    """One answer to "task"."""

    file: str  # of the data
    metric: str  # that validation reports besides the loss
    make_data: Callable[[Path], None]
    read: Callable[[Path], tuple[Any, Any]]
    count: Callable[[Any], int]
    batch: Callable[[Any, Any, list[int]], Any]  # samples, their numbers, their keys
    loss: Callable[..., plain_loop.Loss]
    settings: dict[str, Any] = field(default_factory=dict)  # of its own, for the reference


def write_letters(path: Path) -> None:
    """A text of few letters, of which a tenth of a second trains 30 steps."""
    letters = random.Random(0).choices(b"etaoin shrdlu\n", k=250 * plain_loop.CONTEXT)
    path.write_bytes(bytes(letters))


def write_digits(path: Path) -> None:
    """The first 200 handwritten digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez(path, images=digits.images[:200].astype(np.uint8), labels=digits.target[:200])


TASKS = {
    "language_model": Task(
        file="text.txt",
        metric="bits_per_byte",
        make_data=write_letters,
        read=plain_loop.text,
        count=len,
        batch=lambda rows, ids, keys: rows[ids],
        loss=plain_loop.language_model,
        settings={"optim.name": "muon", "optim.momentum": 0.9},
    ),
    "image_classifier": Task(
        file="digits.npz",
        metric="accuracy",
        make_data=write_digits,
        read=plain_loop.arrays,
        count=lambda samples: len(samples[0]),
        batch=lambda samples, ids, keys: (
            plain_loop.shifted(samples[0][ids], keys),
            samples[1][ids],
        ),
        loss=plain_loop.image_classifier,
    ),
}
