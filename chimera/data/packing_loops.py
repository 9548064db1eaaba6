"""The loops of packing, compiled by numba."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["block_ends", "fill_places", "shuffle"]


@njit(cache=True)
def shuffle(order: NDArray[Any], key: np.uint64) -> None:
    """Shuffle in place (Fisher and Yates), the i-th draw being SplitMix64 of the key and i."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    for last in range(len(order) - 1, 0, -1):
        word = key + golden * np.uint64(last)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
        other = np.int64(word % np.uint64(last + 1))
        order[last], order[other] = order[other], order[last]


@njit(cache=True)
def fill_places(lengths: NDArray[Any], order: NDArray[Any], step: int, places: NDArray[Any]) -> None:
    """Walk over the documents in order, and note where every ``step``-th token lies."""
    place = offset = 0
    for piece in range(len(places)):
        places[piece, 0] = place
        places[piece, 1] = offset
        missing = step
        while missing > 0:
            left = lengths[order[place]] - offset
            if left > missing:
                offset += missing
                missing = 0
            else:
                missing -= left
                place += 1
                offset = 0


@njit(cache=True)
def block_ends(starts: NDArray[Any], ends: NDArray[Any], bounds: NDArray[Any], room: int, found: NDArray[Any]) -> int:
    """Cut each document's sentences into blocks that fill ``room`` tokens; note (first, end) and return how many.

    A block takes sentences while they fit, and at least one; blocks of one sentence are not noted, since nothing would
    be left of them without it.
    """
    count = 0
    for document in range(len(bounds) - 1):
        first = bounds[document]
        while first < bounds[document + 1]:
            end = first + 1
            while end < bounds[document + 1] and ends[end] - starts[first] <= room:
                end += 1
            if end - first > 1:
                found[count, 0] = first
                found[count, 1] = end
                count += 1
            first = end
    return count
