"""Random numbers as functions of a key, not of what was drawn before.

Knows two things: the Philox stream of a (seed, index, purpose), and a permutation of ``range(size)`` that is computed
for one position at a time. Both give the same values in every process and in every order of calls, which is what makes
a sample a pure function of its index. Only raw Philox words are used: their values are fixed by the algorithm, while
those of ``numpy.random.Generator`` may change between numpy releases. Refuses to know what the numbers are for.
"""

import math
from enum import IntEnum

import numpy as np

__all__ = ["NUM_ROUNDS", "Purpose", "below", "keyed_stream", "permuted"]

_WORD = (1 << 64) - 1
NUM_ROUNDS = 6


class Purpose(IntEnum):
    """Separates the streams of one seed, so that no two uses share numbers."""

    SPLIT = 0
    ORDER = 1
    SAMPLE = 2
    DOCUMENTS = 3


def keyed_stream(seed: int, index: int, purpose: Purpose) -> np.random.Philox:
    """Return the counter-based stream of a key; ``random_raw`` draws 64-bit words from it.

    Args:
        seed: 0 or more, below 2**64.
        index: what the stream is for, such as a sample's index: 0 or more, below 2**64.
        purpose: keeps streams of equal seed and index apart.
    """
    # The purpose is the counter's highest word: no stream is long enough to reach the next one's.
    return np.random.Philox(key=seed | index << 64, counter=purpose << 192)


def below(stream: np.random.Philox, bound: int) -> int:
    """Draw one integer of ``range(bound)``; its bias is under bound / 2**64."""
    return int(stream.random_raw()) * bound >> 64


def permuted(position: int, size: int, round_keys: list[int]) -> int:
    """Return the element at ``position`` of a random permutation of ``range(size)``, without making the permutation.

    A Feistel network over the rectangle of height a and width b with a·b ≥ size (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002): each round adds a keyed function of one half to the other. The few results
    outside ``range(size)`` are sent through it again, which stays one-to-one.

    Args:
        position: 0 or more, below ``size``.
        size: 1 or more.
        round_keys: ``NUM_ROUNDS`` words of 64 bits; another list is another permutation.
    """
    height = math.isqrt(size - 1) + 1
    width = -(-size // height)
    while True:
        row, column = divmod(position, width)
        for key in range(0, NUM_ROUNDS, 2):
            row = (row + _mixed(column ^ round_keys[key])) % height
            column = (column + _mixed(row ^ round_keys[key + 1])) % width
        position = row * width + column
        if position < size:
            return position


def _mixed(word: int) -> int:
    """Scramble 64 bits: the last steps of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
