"""What each row of a timeline needed, as rows of the same timeline: producers, their messages, the rank's row before.

It looks up; it judges nothing. Rows are those of ``Timeline.table``.
"""

from typing import NamedTuple

import numpy as np

from chimera.errors import ScheduleError
from chimera.ir.action import Action, Kind
from chimera.ir.dependencies import MESSAGES, PHASES, SENT, needs
from chimera.ir.schedule import Schedule
from chimera.ir.table import NO_MICROBATCH
from chimera.ir.timeline import Lane, Timeline
from chimera.simulate.simulator import CostModel

__all__ = ["Arrival", "NeedIndex"]

_NO_ROW = -1


class Arrival(NamedTuple):
    """One need of a computation: made by row ``producer``, sent at ``sent``, there at ``at``; ``send`` is its SEND row.

    A need on the same rank is there when it is made, and sent at that time too.
    """

    producer: int
    send: int | None
    sent: float
    at: float


class NeedIndex:
    """Row look-ups over one timeline of one schedule; refuses a timeline of another."""

    def __init__(self, schedule: Schedule, timeline: Timeline, costs: CostModel | None) -> None:
        self._schedule = schedule
        self._timeline = timeline
        self._duration = None if costs is None else costs.resolve(schedule).duration
        table = timeline.table
        if (
            timeline.num_ranks != schedule.num_ranks
            or table.stage.max(initial=0) >= schedule.num_stages
            or table.microbatch.max(initial=NO_MICROBATCH) >= schedule.num_microbatches
        ):
            raise ScheduleError(
                f"timeline {timeline.name!r} is not one of schedule {schedule.name!r}: it has other ranks, stages or "
                "micro-batches; needed: the schedule that was run"
            )
        self._row_rank = table.rank
        shape = (len(PHASES), schedule.num_stages, schedule.num_microbatches)
        self._producer = np.full(shape, _NO_ROW)
        self._sender = np.full(shape, _NO_ROW)
        for target, phases in ((self._producer, PHASES), (self._sender, SENT)):
            for kind, phase in phases.items():
                rows = np.flatnonzero(table.kind == kind)
                target[phase, table.stage[rows], table.microbatch[rows]] = rows
        # A pair stands for itself once, by its forward.
        counted = (timeline.lane == Lane.COMPUTE) & ~(table.paired & (table.kind != Kind.F))
        self._computations = np.flatnonzero(counted)
        self._reductions = np.flatnonzero(timeline.lane == Lane.REDUCE)

    def rank_of_row(self, row: int) -> int:
        """Return the rank that ran ``row``."""
        return int(self._row_rank[row])

    def action_of_row(self, row: int) -> Action:
        """Return the action in ``row``."""
        return self._timeline.table.action_at(row)

    def computations_on(self, rank: int) -> list[int]:
        """Return the computation rows of ``rank`` in program order, pairs by their first row."""
        rows = self._timeline.rows(rank)
        low, high = np.searchsorted(self._computations, [rows.start, rows.stop])
        return [int(row) for row in self._computations[low:high]]

    def first_of_pair(self, row: int) -> int:
        """Return the row by which the pair of ``row`` is known; ``row`` itself outside pairs."""
        table = self._timeline.table
        return row - 1 if table.paired[row] and table.kind[row] != Kind.F else row

    def arrivals(self, row: int) -> list[Arrival]:
        """Return the needs of a computation that the timeline holds, of both halves for a pair."""
        table = self._timeline.table
        rows = (row, row + 1) if table.paired[row] else (row,)
        return [arrival for part in rows for arrival in self._arrivals_of_one(part)]

    def latest_predecessor(self, row: int) -> int | None:
        """Return the row whose end ``row`` waited for last; of equal ones the rank's own; None at the first start."""
        timeline = self._timeline
        candidates: list[tuple[float, int]] = []
        if timeline.lane[row] == Lane.REDUCE:
            for part in self._same_reduction(row):
                candidates += self._ends(self._before(self._computations, part), self._before(self._reductions, part))
        else:
            candidates += self._ends(self._before(self._computations, row))
            action = timeline.table.action_at(row)
            if action.kind is Kind.STEP:
                candidates += self._ends(self._reduction_before(row))
            elif timeline.lane[row] == Lane.SEND:
                candidates += self._ends(int(self._producer[SENT[action.kind], action.stage, action.microbatch]))
            else:
                candidates += [(a.at, a.producer if a.send is None else a.send) for a in self.arrivals(row)]
        return max(candidates, key=lambda candidate: candidate[0])[1] if candidates else None

    def _arrivals_of_one(self, row: int) -> list[Arrival]:
        timeline, schedule = self._timeline, self._schedule
        action = timeline.table.action_at(row)
        if action.kind not in PHASES or action.microbatch is None:
            return []
        found = []
        for phase, stage in needs(action, schedule.num_stages):
            producer = int(self._producer[phase, stage, action.microbatch])
            if producer == _NO_ROW:
                continue
            made = float(timeline.end[producer])
            send = int(self._sender[phase, stage, action.microbatch])
            if self._row_rank[producer] == self._row_rank[row]:
                found.append(Arrival(producer, None, made, made))
            elif send != _NO_ROW:
                found.append(Arrival(producer, send, float(timeline.start[send]), float(timeline.end[send])))
            else:
                found.append(Arrival(producer, None, made, made + self._message_time(phase, stage)))
        return found

    def _message_time(self, phase: int, stage: int) -> float:
        kind = next(message.send for message in MESSAGES if message.phase == phase)
        return 0.0 if self._duration is None else float(self._duration[kind, stage])

    def _ends(self, *rows: int) -> list[tuple[float, int]]:
        return [(float(self._timeline.end[row]), row) for row in rows if row != _NO_ROW]

    def _before(self, rows: "np.ndarray[tuple[int, ...], np.dtype[np.intp]]", row: int) -> int:
        """Return the last of ``rows`` (ascending) before ``row`` on the same rank."""
        place = int(np.searchsorted(rows, row)) - 1
        found = int(rows[place]) if place >= 0 else _NO_ROW
        return found if found != _NO_ROW and self._row_rank[found] == self._row_rank[row] else _NO_ROW

    def _reduction_before(self, row: int) -> int:
        """Return the last reduction of ``row``'s stage before it on its rank."""
        table = self._timeline.table
        same = self._reductions[table.stage[self._reductions] == table.stage[row]]
        return self._before(same, row)

    def _same_reduction(self, row: int) -> list[int]:
        """Return the rows of the reduction that ``row`` is part of: on every holder the one of the same count."""
        table = self._timeline.table
        same = self._reductions[table.stage[self._reductions] == table.stage[row]]
        ranks = self._row_rank[same]
        count = int(np.flatnonzero(same[ranks == self._row_rank[row]] == row)[0])
        parts = (same[ranks == rank] for rank in self._schedule.placement.ranks_of(int(table.stage[row])))
        return [int(part[count]) for part in parts if len(part) > count]
