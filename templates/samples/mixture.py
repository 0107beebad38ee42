"""Mixtures of data: several sources in stated proportions, exact in every stretch of the order.

Position k of the endless stream of samples is of one source, and has the n-th sample of it; both
are functions of (weights, k), found in constant time. Each source has epochs of its own.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import UserError
from .sampling import GlobalBatches

LONGEST = 10_000  # a pattern after which the sources take turns as before


def parse(text: str) -> dict[str, int]:
    """Whole-numbered weights by name, from "code=0.7,books=0.3"; UserError if it is not that."""
    weights: dict[str, Fraction] = {}
    try:
        for part in text.split(","):
            name, weight = part.split("=")
            weights[name.strip()] = Fraction(weight.strip())
    except (ValueError, ZeroDivisionError):
        raise UserError(f"--data.mix {text!r}: wanted NAME=WEIGHT,NAME=WEIGHT,...") from None
    if len(weights) != text.count("=") or not all(
        name and weight > 0 for name, weight in weights.items()
    ):
        raise UserError(f"--data.mix {text!r}: wanted each name once, and weights above 0")
    common = lcm(*(weight.denominator for weight in weights.values()))
    whole = {name: int(weight * common) for name, weight in weights.items()}
    whole = {name: weight // gcd(*whole.values()) for name, weight in whole.items()}
    if sum(whole.values()) > LONGEST:
        raise UserError(f"--data.mix {text!r}: give weights of fewer digits (four, of a sum of 1)")
    return whole


def pattern(weights: Sequence[int]) -> np.ndarray:
    """The source of each position, of one period: sum(weights) of them, int64.

    Of the first k positions each source has its part of k, less or more by below 1: its n-th
    sample has a window of time, and the window that closes first goes first (Liu and Layland, 1973:
    earliest deadline; Baruah et al., 1996: proportionate progress).
    """
    period, counts = sum(weights), [0] * len(weights)
    sources = np.empty(period, np.int64)
    for position in range(period):
        open_now = [
            (-(-(count + 1) * period // weight), source)
            for source, (weight, count) in enumerate(zip(weights, counts, strict=True))
            if count * period // weight <= position and count < weight
        ]
        _, source = min(open_now)
        counts[source] += 1
        sources[position] = source
    return sources


class MixedBatches(GlobalBatches):
    """The sample ids of every global batch of a mixture, the same whatever the number of ranks.

    The samples of the first source come first in the ids' count, then those of the second.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Mapping[str, int], batch_size: int, seed: int
    ) -> None:
        super().__init__(sum(sizes), batch_size, seed)
        self.weights = weights
        self.sources = [GlobalBatches(size, 1, seed, 4, i) for i, size in enumerate(sizes)]
        self.pattern = pattern([*weights.values()])
        chosen = self.pattern[:, None] == np.arange(len(sizes))
        self.before = np.concatenate([np.zeros((1, len(sizes)), np.int64), np.cumsum(chosen, 0)])

    def counts(self, position: int) -> np.ndarray:
        """Samples of each source among the first `position` of the stream, int64."""
        periods, place = divmod(position, len(self.pattern))
        return periods * np.array([*self.weights.values()]) + self.before[place]

    def drawn(self, step: int) -> dict[str, int]:
        """Samples of each source in the batches before `step`."""
        counts = self.counts(step * self.batch_size).tolist()
        return dict(zip(self.weights, counts, strict=True))

    def ids_at(self, start: int, stop: int) -> np.ndarray:
        """The ids at positions start ... stop - 1, int64."""
        sources = self.pattern[np.arange(start, stop) % len(self.pattern)]
        ids, first = np.empty(stop - start, np.int64), 0
        bounds = zip(self.counts(start).tolist(), self.counts(stop).tolist(), strict=True)
        for number, (source, (low, high)) in enumerate(zip(self.sources, bounds, strict=True)):
            ids[sources == number] = first + source.ids_at(low, high)
            first += source.size
        return ids


class Joined:
    """Datasets one after the other; as training data, mixed by `weights`."""

    def __init__(self, parts: Sequence[Any], weights: Mapping[str, int]) -> None:
        self.parts, self.weights = parts, weights
        self.ends = np.cumsum([len(part) for part in parts])
        self.draws = any(getattr(part, "draws", True) for part in parts)
        if hasattr(parts[0], "augment"):
            self.augment = parts[0].augment

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """A batch, as of a part."""
        places = np.asarray(ids)
        which = np.searchsorted(self.ends, places, side="right")
        batches, positions = [], []
        for number in np.unique(which):
            positions.append(np.flatnonzero(which == number))
            first = self.ends[number] - len(self.parts[number])
            batches.append(
                self.parts[number].__getitems__((places[positions[-1]] - first).tolist())
            )
        back = torch.from_numpy(np.argsort(np.concatenate(positions)))
        return {name: torch.cat([batch[name] for batch in batches])[back] for name in batches[0]}

    def order(self, batch_size: int, seed: int) -> MixedBatches:
        """The order in which they are mixed."""
        return MixedBatches([len(part) for part in self.parts], self.weights, batch_size, seed)
