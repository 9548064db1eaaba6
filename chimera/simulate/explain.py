"""Why a timeline is as long as it is: the cause of every idle gap, and one critical path through the step.

Both read what happened off a timeline, simulated or recorded, and ask the dependency relation what each action needed;
nothing is simulated again. In a recorded timeline what no need explains is called overhead.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Action, Instruction, Kind
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Span, Timeline
from chimera.simulate.needs import NeedIndex
from chimera.simulate.simulator import CostModel

__all__ = ["Cause", "Gap", "critical_path", "gaps", "idle_by_cause"]


class Cause(StrEnum):
    """Why a rank is idle."""

    WARM_UP = "warm-up"
    WAITING = "waiting"
    COMMUNICATION = "communication"
    REDUCTION = "gradient reduction"
    DRAIN = "drain"
    OVERHEAD = "overhead"


class Gap(NamedTuple):
    """An idle time of one rank with one cause.

    ``before`` is the instruction the rank runs next; ``awaited`` on ``awaited_rank`` is what that one waits for.
    """

    rank: int
    start: float
    end: float
    cause: Cause
    before: Instruction | None = None
    awaited: Action | None = None
    awaited_rank: int | None = None

    def __str__(self) -> str:
        text = f"rank {self.rank}, {self.start:g} to {self.end:g}: {self.cause}"
        if self.awaited is not None:
            word = "for" if self.cause is Cause.WAITING else "from"
            text += f" {word} {self.awaited} on rank {self.awaited_rank}"
        return text if self.before is None else f"{text}, before {self.before}"


def gaps(schedule: Schedule, timeline: Timeline, costs: CostModel | None = None) -> list[Gap]:
    """Return every idle gap of every rank's computation, rank by rank in order of time.

    A gap whose causes follow one another (the awaited action ends, then its message is in flight) is given as one
    ``Gap`` per cause. Over a rank, gaps and computations together fill the makespan exactly.

    Args:
        schedule: the program that was run.
        timeline: of that program, simulated or recorded.
        costs: those of the simulation, for the time of messages that have no span of their own; free without.

    >>> from chimera.ir.costs import Costs
    >>> from chimera.simulate.simulator import simulate
    >>> schedule = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]])
    >>> for gap in gaps(schedule, simulate(schedule)):
    ...     print(gap)
    rank 0, 1 to 4: waiting for 1B0 on rank 1, before 0B0
    rank 1, 0 to 1: warm-up, before 1F0
    rank 1, 4 to 6: drain
    """
    index = NeedIndex(schedule, timeline, costs)
    return [gap for rank in range(timeline.num_ranks) for gap in _gaps_of(rank, timeline, index) if gap.end > gap.start]


def idle_by_cause(found: Iterable[Gap], num_ranks: int) -> dict[Cause, NDArray[np.float64]]:
    """Return the idle time of each cause per rank."""
    sums = {cause: np.zeros(num_ranks) for cause in Cause}
    for gap in found:
        sums[gap.cause][gap.rank] += gap.end - gap.start
    return sums


def critical_path(schedule: Schedule, timeline: Timeline, costs: CostModel | None = None) -> list[Span]:
    """Return a chain of spans from the first start to the last end, each started by the end of the one before it.

    Between two spans on different ranks lies the message's time, which is a span of its own where the timeline has
    sends. In a simulated timeline spans and messages add up to the makespan. In a recorded one, where nothing starts
    at the very moment it may, the chain follows what came last.
    """
    index = NeedIndex(schedule, timeline, costs)
    work = (timeline.lane == Lane.COMPUTE) | (timeline.lane == Lane.REDUCE)
    if not work.any():
        return []
    row: int | None = int(np.argmax(np.where(work, timeline.end, -np.inf)))
    path = []
    while row is not None:
        row = index.first_of_pair(row)
        path.append(_span_at(timeline, row, index.rank_of_row(row)))
        row = index.latest_predecessor(row)
    return path[::-1]


def _gaps_of(rank: int, timeline: Timeline, index: NeedIndex) -> Iterator[Gap]:
    clock = timeline.origin
    rows = index.computations_on(rank)
    for place, row in enumerate(rows):
        start = float(timeline.start[row])
        if start > clock:
            before = timeline.table.instruction_at(row)
            if place == 0:
                yield Gap(rank, clock, start, Cause.WARM_UP, before)
            elif before[0] is Kind.STEP:
                yield Gap(rank, clock, start, Cause.REDUCTION, before)
            else:
                yield from _split_wait(Gap(rank, clock, start, Cause.OVERHEAD, before), row, index)
        clock = max(clock, float(timeline.end[row]))
    yield from _tail(rank, clock, timeline)


def _split_wait(gap: Gap, row: int, index: NeedIndex) -> Iterator[Gap]:
    """Cut the gap before ``row`` into waiting for the producer, its message in flight, and what neither explains."""
    if arrivals := index.arrivals(row):
        last = max(arrivals, key=lambda arrival: arrival.at)
        awaited, awaited_rank = index.action_of_row(last.producer), index.rank_of_row(last.producer)
        for until, cause in ((last.sent, Cause.WAITING), (last.at, Cause.COMMUNICATION)):
            end = min(max(until, gap.start), gap.end)
            yield gap._replace(end=end, cause=cause, awaited=awaited, awaited_rank=awaited_rank)
            gap = gap._replace(start=end)
    yield gap


def _tail(rank: int, clock: float, timeline: Timeline) -> Iterator[Gap]:
    """Cut the time after the rank's last computation into its reductions and the drain around them."""
    rows = timeline.rows(rank)
    reducing = np.flatnonzero(timeline.lane[rows] == Lane.REDUCE) + rows.start
    for row in reducing[np.argsort(timeline.start[reducing], kind="stable")].tolist():
        start, end = float(timeline.start[row]), float(timeline.end[row])
        if end > clock:
            yield Gap(rank, clock, max(start, clock), Cause.DRAIN)
            yield Gap(rank, max(start, clock), end, Cause.REDUCTION)
            clock = end
    yield Gap(rank, clock, timeline.finish, Cause.DRAIN)


def _span_at(timeline: Timeline, row: int, rank: int) -> Span:
    lane = Lane(int(timeline.lane[row]))
    return Span(rank, lane, timeline.table.instruction_at(row), float(timeline.start[row]), float(timeline.end[row]))
