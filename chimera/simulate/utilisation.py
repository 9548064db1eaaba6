"""What each rank made of a step: computing, idle and why, and communication that cost time or did not.

It sums what ``simulate.explain`` finds; nothing is judged twice.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.simulate.explain import Cause, gaps, idle_by_cause
from chimera.simulate.simulator import CostModel

__all__ = ["RankUse", "rank_use", "slowest_rank"]

_EXPOSED = (Cause.COMMUNICATION, Cause.REDUCTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """One rank's step, in the timeline's unit.

    Attributes:
        rank: in its pipeline.
        busy: time that it computes.
        makespan: of the step, first start to last end over all ranks.
        idle: the rest, by cause.
        communication: time in which a message to it or a reduction of it is under way.
        peak_bytes: most memory at once, where known.
    """

    rank: int
    busy: float
    makespan: float
    idle: Mapping[Cause, float]
    communication: float
    peak_bytes: float | None

    @property
    def utilisation(self) -> float:
        """Share of the step that it computes."""
        return self.busy / self.makespan if self.makespan else 0.0

    @property
    def bubble(self) -> float:
        """Share of the step that it is idle."""
        return 1.0 - self.utilisation

    @property
    def exposed(self) -> float:
        """Idle time whose cause is a message or a reduction under way."""
        return sum(self.idle[cause] for cause in _EXPOSED)

    @property
    def hidden(self) -> float:
        """Communication beside computation, or beside an idle time that has another cause."""
        return max(0.0, self.communication - self.exposed)


def rank_use(schedule: Schedule, timeline: Timeline, costs: CostModel | None = None) -> tuple[RankUse, ...]:
    """Return what each rank made of the step.

    Args:
        schedule: the program that was run.
        timeline: of that program, simulated or recorded.
        costs: as ``gaps`` takes them.

    >>> from chimera.ir.costs import Costs
    >>> from chimera.simulate.simulator import simulate
    >>> schedule = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]])
    >>> [(use.busy, use.idle[Cause.WAITING], use.utilisation) for use in rank_use(schedule, simulate(schedule))]
    [(3.0, 3.0, 0.5), (3.0, 0.0, 0.5)]
    """
    idle = idle_by_cause(gaps(schedule, timeline, costs), timeline.num_ranks)
    peaks = timeline.peak_bytes
    return tuple(
        RankUse(
            rank=rank,
            busy=float(timeline.busy[rank]),
            makespan=timeline.makespan,
            idle={cause: float(idle[cause][rank]) for cause in Cause},
            communication=_communicating(timeline, rank),
            peak_bytes=None if peaks is None else peaks[rank],
        )
        for rank in range(timeline.num_ranks)
    )


def slowest_rank(uses: Iterable[RankUse]) -> RankUse:
    """Return the rank that computes longest: the one the others wait for if all else is even."""
    return max(uses, key=lambda use: use.busy)


def _communicating(timeline: Timeline, rank: int) -> float:
    """Return how long some message to ``rank``, or a reduction of it, is under way within the step."""
    rows = timeline.rows(rank)
    chosen = np.isin(timeline.lane[rows], (Lane.RECEIVE, Lane.REDUCE))
    starts = np.maximum(timeline.start[rows][chosen], timeline.origin)
    ends = np.minimum(timeline.end[rows][chosen], timeline.finish)
    order = np.argsort(starts)
    total, until = 0.0, timeline.origin
    for start, end in zip(starts[order].tolist(), ends[order].tolist(), strict=True):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
