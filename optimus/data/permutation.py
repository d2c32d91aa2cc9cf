"""Computes a seeded permutation of [0, n) without a table.

A Feistel network permutes numbers of b bits. The permutation maps an image outside [0, n) again until the image is
inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.uint64]

ROUNDS = 12
# Number of indices of a block, chosen for the second-level cache.
BLOCK = 1 << 15
# Multipliers of the splitmix64 finaliser (Steele, Lea, Flood 2014).
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


class Permutation:
    """A permutation of [0, size) that `size` and `key` determine.

    A call maps an int64 array of indices to an int64 array of the same shape. Raises `IndexError` for indices outside
    [0, size). `inverse` maps images back to indices.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        if size < 0:
            raise ValueError(f"size must not be negative, got {size}")
        self.size = size
        # With fewer than six bits, the permutations would be less uniform.
        bits = max(6, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._high_bits = np.uint64(bits - bits // 2)
        digest = hashlib.shake_256(repr(key).encode()).digest(8 * ROUNDS)
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._mapped(indices, self._encrypt)

    def inverse(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the indices that a call maps to `images`, an array of the same shape. Raises `IndexError` like a
        call."""
        return self._mapped(images, self._decrypt)

    def _mapped(self, indices: NDArray[np.int64], once: Callable[[_Numbers], _Numbers]) -> NDArray[np.int64]:
        flat = np.ascontiguousarray(indices, dtype=np.int64).ravel()
        if flat.size and not (flat.min() >= 0 and flat.max() < self.size):
            raise IndexError(f"indices must lie in [0, {self.size})")
        image = np.empty_like(flat)
        for start in range(0, flat.size, BLOCK):
            image[start : start + BLOCK] = self._walk(flat[start : start + BLOCK].astype(np.uint64), once)
        return image.reshape(np.shape(indices))

    def _walk(self, x: _Numbers, once: Callable[[_Numbers], _Numbers]) -> _Numbers:
        x = once(x)
        outside = np.flatnonzero(x >= self.size)
        while outside.size:
            again = once(x[outside])
            x[outside] = again
            outside = outside[again >= self.size]
        return x

    def _encrypt(self, x: _Numbers) -> _Numbers:
        """Runs one pass of the network over numbers of `_high_bits + _low_bits` bits.

        After an even number of rounds, the high and the low bits have their original widths.
        """
        masks = self._masks
        high, low = x >> self._low_bits, x & masks[1]
        for round_, key in enumerate(self._keys):
            high, low = low, (high ^ _mix(low + key)) & masks[round_ % 2]
        return (high << self._low_bits) | low

    def _decrypt(self, x: _Numbers) -> _Numbers:
        """Inverts one pass of the network."""
        masks = self._masks
        high, low = x >> self._low_bits, x & masks[1]
        for round_, key in reversed([*enumerate(self._keys)]):
            high, low = (low ^ _mix(high + key)) & masks[round_ % 2], high
        return (high << self._low_bits) | low

    @property
    def _masks(self) -> tuple[np.uint64, np.uint64]:
        one = np.uint64(1)
        return (one << self._high_bits) - one, (one << self._low_bits) - one


def _mix(x: _Numbers) -> _Numbers:
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))
