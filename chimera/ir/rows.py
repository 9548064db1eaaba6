"""A schedule's table together with what its placement says about every row: rank, home, and who produces what.

The checks and the passes ask it the same questions in bulk: on which rank does a stage run for a micro-batch, at which
row is a computation done, which data crosses ranks. It judges nothing and assumes indices that are in range.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Kind
from chimera.ir.dependencies import NEEDS, PHASES, Phase
from chimera.ir.schedule import Placement, Schedule
from chimera.ir.table import Table

__all__ = ["NOTHING", "Needs", "Rows", "code_mask", "phase_of_kind"]

NOTHING = -1
"""A row number that stands for none: a column of integers has no None."""


def code_mask(table: Table, *kinds: Kind) -> NDArray[np.bool_]:
    """Return which rows are of one of the kinds."""
    lookup = np.zeros(256, np.bool_)
    lookup[list(kinds)] = True
    return lookup[table.kind]


def phase_of_kind() -> NDArray[np.int8]:
    """Return the phase of each kind code, ``NOTHING`` for kinds that are no computations."""
    phases = np.full(256, NOTHING, np.int8)
    for kind, phase in PHASES.items():
        phases[kind] = phase
    return phases


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """Pairs of rows, computations of one micro-batch: ``row`` may start only after ``producer`` has ended."""

    row: NDArray[np.int64]
    producer: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns beside a table's own.

    Attributes:
        table: the columns this stands beside.
        placement: where each stage lives.
        route: the route of each micro-batch, [micro-batches].
        rank: the rank of each row, [rows].
        home: the rank that computes a stage for a micro-batch, [stages, micro-batches].
        first: the first row of the row's instruction, [rows]; differs from the row itself on the second of a pair.
        last: the last row of the row's instruction, [rows]: what a row gives exists when ``last`` has ended.
        place: the row of the computation of (phase, stage, micro-batch), ``NOTHING`` if it is missing.
    """

    table: Table
    placement: Placement
    route: NDArray[np.int32]
    rank: NDArray[np.int32]
    home: NDArray[np.int32]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    place: NDArray[np.int64]

    @classmethod
    def of(cls, schedule: Schedule) -> "Rows":
        """Derive the columns of a schedule whose indices are in range."""
        return cls.of_table(schedule.table, schedule.placement, schedule.microbatch_to_route)

    @classmethod
    def of_table(cls, table: Table, placement: Placement, microbatch_to_route: tuple[int, ...]) -> "Rows":
        """Derive the columns of a table whose indices are in range."""
        route = np.array(microbatch_to_route, np.int32)
        home = np.ascontiguousarray(np.array(placement.routes, np.int32)[route].T)
        number = np.arange(len(table), dtype=np.int64)
        first, last = number, number
        if table.paired.any():
            # The rows of pairs come in twos, wherever the pairs stand.
            paired = np.flatnonzero(table.paired)
            first, last = number.copy(), number.copy()
            first[paired[1::2]] -= 1
            last[paired[0::2]] += 1
        phase = phase_of_kind()[table.kind]
        computations = np.flatnonzero(phase != NOTHING)
        place = np.full((len(Phase), placement.num_stages, len(route)), NOTHING, np.int64)
        place[phase[computations], table.stage[computations], table.microbatch[computations]] = computations
        return cls(table, placement, route, table.rank, home, first, last, place)

    def replicas(self) -> Iterator[tuple[int, int]]:
        """Yield (rank, stage) of every replica once, ascending."""
        yield from sorted({(rank, stage) for route in self.placement.routes for stage, rank in enumerate(route)})

    def end_of(self, rank: int) -> int:
        """Return the position behind a rank's last instruction."""
        first, end = self.table.offsets[rank : rank + 2].tolist()
        return int(self.table.position[end - 1]) + 1 if end > first else 0

    def needs(self) -> list[Needs]:
        """Return the dependency relation between the rows that are there, one entry per row of ``NEEDS``."""
        table = self.table
        phase = phase_of_kind()[table.kind]
        found = []
        for own, needed, offset in NEEDS:
            rows = np.flatnonzero(phase == own)
            stages = table.stage[rows] + offset
            if offset:
                inside = (stages >= 0) & (stages < self.placement.num_stages)
                rows, stages = rows[inside], stages[inside]
            producers = self.place[needed, stages, table.microbatch[rows]]
            there = producers != NOTHING
            found.append(Needs(rows[there], producers[there]))
        return found
