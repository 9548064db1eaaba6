"""Gradient reductions and optimizer steps: every replica takes part once, late enough, and in one order everywhere.

A reduction is collective over the ranks that hold the stage; two ranks that share two of them and start them in
different orders wait for each other for ever. What a reduction does is the runtime's business.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import numpy as np

from chimera.ir.action import Action, Kind
from chimera.ir.rows import Rows, code_mask
from chimera.ir.violation import Violation, violation_at

__all__ = ["reduction_violations"]


def reduction_violations(rows: Rows) -> list[Violation]:
    """Check the REDUCE_GRADs of a schedule that has any.

    Each rank reduces each stage it holds exactly once, after its last gradient for it. Asynchronous schedules (those
    with a STEP) reduce once per update instead, so there only the replicas' counts have to agree.
    """
    reductions = np.flatnonzero(rows.table.kind == Kind.REDUCE_GRAD)
    if not len(reductions):
        return []
    started: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in reductions.tolist():
        started[int(rows.rank[row])][int(rows.table.stage[row])].append(row)
    if (rows.table.kind == Kind.STEP).any():
        return list(_uneven(rows, started))
    found = [*_counts(rows, started), *_early(rows, started)]
    return found or list(_orders(rows, started))


def _held(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield (rank, stage) of every replica once."""
    yield from sorted({(rank, stage) for route in rows.placement.routes for stage, rank in enumerate(route)})


def _end(rows: Rows, rank: int) -> int:
    """Return the position behind a rank's last instruction."""
    first, end = rows.table.offsets[rank : rank + 2].tolist()
    return int(rows.table.position[end - 1]) + 1 if end > first else 0


def _counts(rows: Rows, started: dict[int, dict[int, list[int]]]) -> Iterator[Violation]:
    for rank, stage in _held(rows):
        here = started[rank][stage]
        if not here:
            message = "missing: this rank holds the stage and others are reduced; add it after the last gradient"
            yield Violation(rank, _end(rows, rank), str(Action(Kind.REDUCE_GRAD, stage, None)), message, "reductions")
        for row in here[1:]:
            yield violation_at(rows.table, row, "reductions", "the stage is reduced already; remove one of them")


def _uneven(rows: Rows, started: dict[int, dict[int, list[int]]]) -> Iterator[Violation]:
    most: dict[int, int] = defaultdict(int)
    for rank, stage in _held(rows):
        most[stage] = max(most[stage], len(started[rank][stage]))
    for rank, stage in _held(rows):
        if len(started[rank][stage]) < most[stage]:
            message = f"missing: another replica starts {most[stage]} of them, this one {len(started[rank][stage])}"
            yield Violation(rank, _end(rows, rank), str(Action(Kind.REDUCE_GRAD, stage, None)), message, "reductions")


def _early(rows: Rows, started: dict[int, dict[int, list[int]]]) -> Iterator[Violation]:
    final = np.full((rows.placement.num_ranks, rows.placement.num_stages), -1, np.int64)
    gradients = np.flatnonzero(code_mask(rows.table, Kind.B, Kind.W))
    np.maximum.at(final, (rows.rank[gradients], rows.table.stage[gradients]), gradients)
    for rank, stages in started.items():
        for stage, starts in stages.items():
            for row in starts:
                if final[rank, stage] > row:
                    position = int(rows.table.position[final[rank, stage]])
                    message = (
                        f"the stage's last gradient on this rank comes at position {position}; move it behind that"
                    )
                    yield violation_at(rows.table, row, "reductions", message)


def _orders(rows: Rows, started: dict[int, dict[int, list[int]]]) -> Iterator[Violation]:
    """Compare the orders of each two ranks that share two stages; report the first that differs."""
    begin = {rank: {stage: starts[0] for stage, starts in stages.items()} for rank, stages in started.items()}
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, stage in _held(rows):
        holders[stage].append(rank)
    shared: dict[tuple[int, int], list[int]] = defaultdict(list)
    for stage, ranks in holders.items():
        for pair in combinations(ranks, 2):
            shared[pair].append(stage)
    for one, other in sorted(pair for pair, stages in shared.items() if len(stages) > 1):
        here, there = (sorted(shared[one, other], key=begin[rank].__getitem__) for rank in (one, other))
        index = next((i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b), None)
        if index is not None:
            row = begin[other][there[index]]
            reduction = Action(Kind.REDUCE_GRAD, here[index], None)
            message = f"rank {one} starts {reduction} before it and this rank after it; start both in the same order"
            yield violation_at(rows.table, row, "reductions", message)
