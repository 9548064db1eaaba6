"""New rows put between the instructions of a table, the one edit that all placing passes share.

It keeps the order of what is there and knows nothing of what the new rows mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chimera.ir.table import Table

__all__ = ["Insertion", "insert_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class Insertion:
    """Columns of new rows; each goes before instruction ``gap`` of ``rank``, behind the last if there is none."""

    rank: NDArray[np.integer]
    gap: NDArray[np.integer]
    kind: NDArray[np.uint8]
    stage: NDArray[np.integer]
    microbatch: NDArray[np.integer]


def insert_rows(table: Table, insertions: Sequence[Insertion]) -> Table:
    """Return the table with the rows of each insertion at their gaps.

    Rows for the same gap keep the order given: insertion after insertion, and by index within one.
    """
    ranks = np.concatenate([new.rank for new in insertions]).astype(np.int64)
    gaps = np.concatenate([new.gap for new in insertions]).astype(np.int64)
    width = 2 * (int(table.position.max(initial=0)) + 2)
    old_keys = table.rank.astype(np.int64) * width + 2 * table.position + 1
    order = np.argsort(np.concatenate([ranks * width + 2 * gaps, old_keys]), kind="stable")

    paired = np.concatenate([np.zeros(len(gaps), np.bool_), table.paired])[order]
    lengths = np.diff(table.offsets) + np.bincount(ranks, minlength=len(table.offsets) - 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Table(
        kind=np.concatenate([*(new.kind for new in insertions), table.kind])[order],
        stage=np.concatenate([*(new.stage for new in insertions), table.stage])[order].astype(np.int32),
        microbatch=np.concatenate([*(new.microbatch for new in insertions), table.microbatch])[order].astype(np.int32),
        paired=paired,
        position=_positions(paired, offsets),
        offsets=offsets,
    )


def _positions(paired: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Count instructions from 0 on each rank; the second row of a pair does not count."""
    begins = np.ones(len(paired), np.int64)
    begins[np.flatnonzero(paired)[1::2]] = 0
    number = np.concatenate([[0], np.cumsum(begins)])
    position: NDArray[np.int32] = (number[1:] - 1 - np.repeat(number[offsets[:-1]], np.diff(offsets))).astype(np.int32)
    return position
