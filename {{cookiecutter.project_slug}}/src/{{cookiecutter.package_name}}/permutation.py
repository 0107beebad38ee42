"""Compute random 64-bit words and random permutations from keys; large ones are never stored.

A word is a function of its key and index; an element of a permutation is a function of its key and
position. So any element is available in O(1), for a domain of any size.
"""

import numpy as np

# The increment of SplitMix64: 2^64 / golden ratio.
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
# Rounds of the cipher. Four rounds are measurably biased on small domains.
ROUNDS = 6
# Below this size a sorted table is cheaper than a cipher, and exactly uniform.
TABLE_BELOW = 4096


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def stream_key(*words: int) -> int:
    """Hash integers into one 64-bit key; changing any word gives an unrelated key."""
    key = 0
    # Uses Python integers, since NumPy is ten times slower on single words.
    for word in words:
        key = (key + GOLDEN + word) & MASK
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB & MASK
        key ^= key >> 31
    return key


def random_words(key: int, indices: np.ndarray) -> np.ndarray:
    """Compute SplitMix64's random 64-bit words of a key at these indices (uint64)."""
    # Arithmetic of uint64 wraps around at 2^64, as SplitMix64 requires.
    return mix(indices * np.uint64(GOLDEN) + np.uint64(key))


class Permutation:
    """A keyed bijection of 0 ... size - 1, which is a table if it is small.

    A large one is computed only at the positions that are read. It is a balanced Feistel network
    (Luby and Rackoff, 1988) over as many bits as `size - 1` needs, or one more, so that both halves
    have the same number. It is repeated until the result is inside the domain (cycle walking, Black
    and Rogaway, 2002: fewer than four times on average).
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self.table: np.ndarray | None = None
        if size < TABLE_BELOW:
            # The argsort of random words is a random permutation.
            words = random_words(key, np.arange(size, dtype=np.uint64))
            self.table = np.argsort(words, kind="stable")
            return
        # One key for each round.
        self.keys = random_words(key, np.arange(ROUNDS, dtype=np.uint64))
        # The number of bits in each half of a value, rounded up.
        half = ((size - 1).bit_length() + 1) // 2
        self.half = np.uint64(half)
        self.mask = np.uint64((1 << half) - 1)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map positions in an epoch (int64, one axis) to sample ids (int64)."""
        if self.table is not None:
            return self.table[positions]
        # The cipher permutes 0 ... 4^half - 1, up to four times as many values as `size`. A result
        # that is not below `size` is encrypted again until it is. This follows the cycle of the
        # cipher from each position to the next value below `size`. Two positions never reach the
        # same value, so the result is a permutation of 0 ... size - 1.
        values = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = np.flatnonzero(values >= self.size)
        return values.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        # A round maps (left, right) to (right, left ^ f(right)), which can be undone whatever f is.
        # So the result is a bijection. Here f takes the top bits after two multiplications.
        left = values >> self.half
        right = values & self.mask
        for key in self.keys:
            # Memory traffic dominates, so nearly all operations are in place.
            scrambled = right ^ key
            scrambled *= np.uint64(0xBF58476D1CE4E5B9)
            scrambled ^= scrambled >> np.uint64(32)
            scrambled *= np.uint64(0x94D049BB133111EB)
            scrambled >>= np.uint64(64) - self.half
            scrambled ^= left
            left, right = right, scrambled
        return (left << self.half) | right
