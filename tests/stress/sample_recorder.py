"""Writes down which samples a rank asks for at each step; elastic.py copies it into renders.

It stands where anybody may put something: around the dataset, and among what is called after each
step. The loop is as it is.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

asked: list[list[int]] = []


class Asked:
    """A dataset that remembers what it was asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __getitems__(self, ids: list[int]) -> Any:
        asked.append(list(ids))
        return self.dataset.__getitems__(ids)


def of_build_datasets(build: Callable[..., Any]) -> Callable[..., Any]:
    """Put it around the training data."""

    def build_datasets(config: Any) -> Any:
        train, *others = build(config)
        return Asked(train), *others

    return build_datasets


class Recorder:
    """A line for each step that this rank has finished; past the step in the file PACE it dawdles.

    A file for each process, named by what the processes of one start have in common, and its rank.
    """

    def __init__(self) -> None:
        start, folder = os.environ.get("MASTER_PORT", "plain"), Path(os.environ["RECORDS"])
        path = folder / f"{start}-{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
        self.file = path.open("a", encoding="utf-8")
        self.pace = Path(os.environ["PACE"])

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Note the samples that count: a rank with nothing left is given one at weight zero."""
        parts = asked[-len(state.plan) :]
        ids = [
            i for part, (_, weight) in zip(parts, state.plan, strict=True) if weight for i in part
        ]
        asked.clear()
        line = {"step": state.step, "size": state.world.size, "ids": ids, "at": time.time()}
        print(json.dumps(line), file=self.file, flush=True)
        if state.step > int(self.pace.read_text("utf-8")):
            time.sleep(0.8)


def of_callbacks(callbacks: Callable[..., Any]) -> Callable[..., Any]:
    """Put a recorder beside the others."""

    def with_recorder(*arguments: Any) -> Iterator[Any]:
        for callback in callbacks(*arguments):
            callback.length = 2  # tokens of a sample; more take longer than all that is tried
            yield callback
        yield Recorder()

    return with_recorder
