"""Mix several data sources in given proportions, which hold throughout the order of samples.

Position k of the endless order is the n-th sample of one source. The source and n are functions of
(weights, k), computed in constant time. Each source has its own epochs.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .collate import owner_of
from .errors import UserError
from .sampling import MIXTURE, GlobalBatches, divide_up

# The maximum length of the repeating pattern of sources.
LONGEST = 10_000


def parse(text: str) -> dict[str, int]:
    """Parse "code=0.7,books=0.3" into integer weights by name; UserError if that fails."""
    weights: dict[str, Fraction] = {}
    try:
        for item in text.split(","):
            name, weight = item.split("=")
            weights[name.strip()] = Fraction(weight.strip())
    except (ValueError, ZeroDivisionError):
        raise UserError(f"--data.mix {text!r}: write NAME=WEIGHT,NAME=WEIGHT,...") from None
    # A name that is given twice has two "=" signs in the text, but is only once in `weights`.
    repeats_a_name = len(weights) < text.count("=")
    if repeats_a_name or "" in weights or min(weights.values()) <= 0:
        raise UserError(f"--data.mix {text!r}: give each name once, with a weight above 0")
    # Find the smallest integers in the same proportion: 0.6 and 0.4 become 3 and 2.
    denominator = lcm(*(weight.denominator for weight in weights.values()))
    numerators = {name: int(weight * denominator) for name, weight in weights.items()}
    divisor = gcd(*numerators.values())
    smallest = {name: numerator // divisor for name, numerator in numerators.items()}
    if sum(smallest.values()) > LONGEST:
        raise UserError(
            f"--data.mix {text!r}: the weights have too many digits; round them to four decimals, "
            "with a sum of 1"
        )
    return smallest


def pattern(weights: Sequence[int]) -> np.ndarray:
    """Return the source of each position in one period of sum(weights) positions, int64.

    Among the first k positions, the count of each source differs by less than one from its exact
    share, k * weight / period. Each sample of a source has a window of allowed positions, and each
    position goes to the source whose open window closes first (earliest deadline first: Liu and
    Layland, 1973; proportionate progress: Baruah et al., 1996).
    """
    period = sum(weights)
    counts = [0] * len(weights)
    sources = np.empty(period, np.int64)
    for position in range(period):
        # The end and the source of each open window. If two end together, the first source wins.
        windows: list[tuple[int, int]] = []
        for source, (weight, count) in enumerate(zip(weights, counts, strict=True)):
            opens = count * period // weight
            closes = divide_up((count + 1) * period, weight)
            if opens <= position and count < weight:
                windows.append((closes, source))
        _, source = min(windows)
        counts[source] += 1
        sources[position] = source
    return sources


class MixedBatches(GlobalBatches):
    """Computes the sample ids of any global batch of a mixture, for any number of ranks.

    The ids of the first source start at 0. Those of the second source follow, and so on.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Mapping[str, int], batch_size: int, seed: int
    ) -> None:
        super().__init__(sum(sizes), batch_size, seed)
        self.weights = weights
        self.sources: list[GlobalBatches] = []
        for index, size in enumerate(sizes):
            # Any batch size will do, since `ids_at` does not depend on it.
            self.sources.append(GlobalBatches(size, 1, seed, MIXTURE, index))
        self.pattern = pattern(list(weights.values()))
        # Row k of `before` counts the samples of each source before position k of a period.
        is_chosen = self.pattern[:, None] == np.arange(len(sizes))
        first_row = np.zeros((1, len(sizes)), np.int64)
        self.before = np.concatenate([first_row, np.cumsum(is_chosen, axis=0)])

    def counts(self, position: int) -> np.ndarray:
        """Count the samples of each source before `position` of the order, int64."""
        periods, offset = divmod(position, len(self.pattern))
        # In a whole period, each source has as many samples as its weight says.
        per_period = np.array(list(self.weights.values()))
        return periods * per_period + self.before[offset]

    def drawn(self, step: int) -> dict[str, int]:
        """Count the samples of each source in the batches before `step`."""
        counts = self.counts(step * self.batch_size).tolist()
        return dict(zip(self.weights, counts, strict=True))

    def ids_at(self, start: int, stop: int) -> np.ndarray:
        """Return the sample ids at positions start ... stop - 1, int64."""
        sources = self.pattern[np.arange(start, stop) % len(self.pattern)]
        ids = np.empty(stop - start, np.int64)
        # The samples that these positions take from a source are consecutive in the source's order.
        starts = self.counts(start).tolist()
        stops = self.counts(stop).tolist()
        first_id = 0
        for index, source in enumerate(self.sources):
            ids[sources == index] = first_id + source.ids_at(starts[index], stops[index])
            first_id += source.size
        return ids


class Joined:
    """Concatenates datasets; for training, `order` mixes them by `weights`."""

    def __init__(self, datasets: Sequence[Any], weights: Mapping[str, int]) -> None:
        self.datasets = datasets
        self.weights = weights
        # Ids run on from one dataset to the next. For each dataset, its last id plus one.
        self.ends = np.cumsum([len(dataset) for dataset in datasets])
        # `fetch` (sampling.py) seeds random numbers unless this is False.
        self.draws = any(getattr(dataset, "draws", True) for dataset in datasets)
        # All datasets come from source.py, so the first one can augment any batch.
        owner = owner_of("augment", datasets[0])
        if owner is not None:
            self.augment = owner.augment

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitems__(self, ids: list[int]) -> dict[str, Tensor]:
        """Read a batch, with one call of each dataset that has samples in the batch."""
        all_ids = np.asarray(ids)
        dataset_indices = np.searchsorted(self.ends, all_ids, side="right")
        batches: list[dict[str, Tensor]] = []
        # For each of `batches`, the indices of its samples in `ids`.
        indices_in_ids: list[np.ndarray] = []
        for index in np.unique(dataset_indices):
            dataset = self.datasets[index]
            first_id = self.ends[index] - len(dataset)
            chosen = np.flatnonzero(dataset_indices == index)
            batches.append(dataset.__getitems__((all_ids[chosen] - first_id).tolist()))
            indices_in_ids.append(chosen)
        # Concatenated batches are grouped by dataset. This brings them into the order of `ids`.
        order_of_ids = torch.from_numpy(np.argsort(np.concatenate(indices_in_ids)))
        joined: dict[str, Tensor] = {}
        for name in batches[0]:
            joined[name] = torch.cat([batch[name] for batch in batches])[order_of_ids]
        return joined

    def order(self, batch_size: int, seed: int) -> MixedBatches:
        """Return the order in which the datasets are mixed."""
        sizes = [len(dataset) for dataset in self.datasets]
        return MixedBatches(sizes, self.weights, batch_size, seed)
