"""The samples of an epoch are complete and in random order, the same on any number of ranks."""

import numpy as np
import pytest

from {{ cookiecutter.package_name }} import sampling
from {{ cookiecutter.package_name }}.sampling import GlobalBatches, Permutation, micro_batches


# Below 4096 samples a permutation is a table, from there on a cipher.
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 4095, 4096, 4097, 10_007])
def test_a_permutation_gives_every_sample_once(size: int) -> None:
    ids = Permutation(size, key=5)(np.arange(size))
    assert np.array_equal(np.sort(ids), np.arange(size))


# 500 samples use the table, 50,000 the cipher.
@pytest.mark.parametrize("size", [500, 50_000])
def test_a_permutation_looks_random(size: int) -> None:
    """Over many keys, a fixed sample is in each tenth of the epoch about equally often."""
    positions = np.arange(size)
    # The position of sample 0 in the permutation of each of 200 keys.
    landings = []
    for key in range(200):
        ids = Permutation(size, key)(positions)
        landings.append(int(np.flatnonzero(ids == 0)[0]))
    # Count the positions in each tenth of the epoch: 20 are expected.
    counts = np.bincount(np.array(landings) * 10 // size, minlength=10)
    chi_squared = ((counts - 20) ** 2 / 20).sum()
    # With nine degrees of freedom, the statistic exceeds 27.9 once in a thousand cases.
    assert chi_squared < 27.9


def test_epochs_follow_each_other_without_a_gap() -> None:
    """103 batches of 8 are exactly 8 epochs of 103 samples; batches may span two epochs."""
    size, batch_size = 103, 8
    order = GlobalBatches(size, batch_size, seed=1)
    stream = np.concatenate([order.ids(step) for step in range(size)])
    epochs = stream.reshape(batch_size, size)
    assert np.array_equal(np.sort(epochs), [np.arange(size)] * batch_size)
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_late_batch_is_as_near_as_the_first() -> None:
    """The last batch of a huge epoch is computed at once, without those before it."""
    ids = GlobalBatches(10**12, 64, seed=1).ids(10**12 // 64 - 1)
    assert len(set(ids.tolist())) == 64
    assert 0 <= ids.min() < ids.max() < 10**12


@pytest.mark.parametrize("world_size", range(1, 12))
@pytest.mark.parametrize("micro_batch_size", [1, 3, 16])
def test_ranks_share_a_batch_without_overlap(world_size: int, micro_batch_size: int) -> None:
    """A batch of 11, which most numbers of ranks do not divide, on up to 11 ranks.

    Micro-batches of weight 0 are padding: they give all ranks the same number of micro-batches.
    """
    batch = GlobalBatches(1000, 11, seed=3).ids(17)
    plans = [micro_batches(11, micro_batch_size, rank, world_size) for rank in range(world_size)]
    seen = [batch[s.indices] for plan in plans for s in plan if s.weight]
    assert np.concatenate(seen).tolist() == batch.tolist()
    assert len({len(plan) for plan in plans}) == 1, "collectives would not match"
    assert all(0 < len(batch[s.indices]) <= micro_batch_size for plan in plans for s in plan)
    sizes = [[len(batch[s.indices]) for s in plan if s.weight] for plan in plans]
    assert all(max(of_rank) - min(of_rank) <= 1 for of_rank in sizes), "a micro-batch is small"


def test_another_seed_is_another_order() -> None:
    """The first batches of two seeds differ."""
    first, second = (GlobalBatches(1000, 100, seed).ids(0) for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_augmentation_differs_by_position_not_by_batch() -> None:
    """Each position has its own key, which is the same in any batch that contains the position."""
    keys = sampling.sample_keys(7, np.arange(100))
    assert len(set(keys.tolist())) == 100
    assert np.array_equal(keys[40:60], sampling.sample_keys(7, np.arange(40, 60)))


def test_the_validation_subset_stays() -> None:
    """Each call chooses the same samples; a count of 0 chooses all."""
    assert np.array_equal(sampling.fixed_subset(1000, 10), sampling.fixed_subset(1000, 10))
    assert sorted(sampling.fixed_subset(50, 0)) == list(range(50))
