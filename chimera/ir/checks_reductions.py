"""Gradient reductions: every replica takes part once per update, late enough, and in one order everywhere.

A reduction is collective over the ranks that hold the stage; two ranks that share two of them and start them in
different orders wait for each other for ever. What a reduction does is the runtime's business.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Action, Kind
from chimera.ir.rows import NOTHING, Rows, code_mask
from chimera.ir.violation import Violation, violation_at

__all__ = ["reduction_violations"]

_Started = Mapping[tuple[int, int], list[int]]
"""The rows of the reductions of each (rank, stage), in order."""


def reduction_violations(rows: Rows, before: NDArray[np.int64]) -> list[Violation]:
    """Check the REDUCE_GRADs of a schedule that has any.

    Each rank reduces each stage it holds exactly once per update, after its last gradient for it. A synchronous
    schedule has one update, the caller's; an asynchronous one makes its own, each by a STEP behind the reduction.

    Args:
        rows: of a complete schedule, whose updates are in order.
        before: for each row, the updates of its stage before it; see ``versions.updates_before``.
    """
    reductions = np.flatnonzero(rows.table.kind == Kind.REDUCE_GRAD)
    if not len(reductions):
        return []
    started: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in reductions.tolist():
        started[int(rows.rank[row]), int(rows.table.stage[row])].append(row)
    steps = np.flatnonzero(rows.table.kind == Kind.STEP)
    number = int(before[steps].max()) + 1 if len(steps) else 1
    found = [*_counts(rows, started, before, number), *_early(rows, started, before, number)]
    return found or list(_orders(rows, started))


def _counts(rows: Rows, started: _Started, before: NDArray[np.int64], number: int) -> Iterator[Violation]:
    for rank, stage in rows.replicas():
        reduced: set[int] = set()
        for row in started.get((rank, stage), ()):
            update = int(before[row])
            if update >= number:
                yield violation_at(rows.table, row, "reductions", "no update is behind it; remove it")
            elif update in reduced:
                message = "the stage is reduced already; remove one of them"
                yield violation_at(rows.table, row, "reductions", message)
            reduced.add(update)
        if len(missing := set(range(number)) - reduced) > 0:
            where = "" if number == 1 else f" of update {min(missing)}"
            message = (
                "missing: this rank holds the stage and others are reduced; add it after the last gradient" + where
            )
            text = str(Action(Kind.REDUCE_GRAD, stage, None))
            yield Violation(rank, _place_of(rows, before, rank, stage, min(missing)), text, message, "reductions")


def _place_of(rows: Rows, before: NDArray[np.int64], rank: int, stage: int, update: int) -> int:
    """Return the position of a STEP, or of the program's end where there is none."""
    table = rows.table
    steps = (table.kind == Kind.STEP) & (rows.rank == rank) & (table.stage == stage) & (before == update)
    return int(table.position[np.flatnonzero(steps)[0]]) if steps.any() else rows.end_of(rank)


def _early(rows: Rows, started: _Started, before: NDArray[np.int64], number: int) -> Iterator[Violation]:
    replica = np.full((rows.placement.num_ranks, rows.placement.num_stages), NOTHING, np.int64)
    for index, (rank, stage) in enumerate(rows.replicas()):
        replica[rank, stage] = index
    final = np.full((int(replica.max()) + 1, number), NOTHING, np.int64)
    gradients = np.flatnonzero(code_mask(rows.table, Kind.B, Kind.W))
    held = replica[rows.rank[gradients], rows.table.stage[gradients]]
    np.maximum.at(final, (held, before[gradients]), gradients)
    for (rank, stage), starts in started.items():
        for row in starts:
            last = int(final[replica[rank, stage], before[row]]) if before[row] < number else NOTHING
            if last > row:
                which = "last gradient" if number == 1 else f"last gradient of update {before[row]}"
                message = f"the stage's {which} on this rank comes at position {rows.table.position[last]}"
                yield violation_at(rows.table, row, "reductions", f"{message}; move it behind that")


def _orders(rows: Rows, started: _Started) -> Iterator[Violation]:
    """Compare the orders of each two ranks that share two stages; report the first that differs."""
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, stage in rows.replicas():
        holders[stage].append(rank)
    shared: dict[tuple[int, int], list[int]] = defaultdict(list)
    for stage, ranks in holders.items():
        for pair in combinations(ranks, 2):
            shared[pair].append(stage)
    for one, other in sorted(pair for pair, stages in shared.items() if len(stages) > 1):
        here, there = (sorted(row for s in shared[one, other] for row in started[rank, s]) for rank in (one, other))
        for first, second in zip(here, there, strict=True):
            if rows.table.stage[first] != rows.table.stage[second]:
                reduction = rows.table.action_at(first)
                message = f"rank {one} starts {reduction} before it and this rank after it"
                message += "; start both in the same order"
                yield violation_at(rows.table, second, "reductions", message)
                break
