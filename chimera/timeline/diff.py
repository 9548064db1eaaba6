"""What differs between two timelines of one schedule, usually a predicted and a measured one.

Messages are compared only where both timelines have them; a compute-only simulation has none. Nothing here says why
they differ; ``simulate.gaps`` does.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chimera.ir.action import Instruction, Kind
from chimera.ir.timeline import Lane, Timeline

__all__ = ["KindDiff", "Move", "RankDiff", "TimelineDiff", "diff"]

_WORK = frozenset({Lane.COMPUTE, Lane.REDUCE})


class KindDiff(NamedTuple):
    """Summed time and number of one kind's actions; a pair's time counts half to each."""

    kind: Kind
    predicted: float
    measured: float
    num_predicted: int
    num_measured: int


class RankDiff(NamedTuple):
    """Time one rank computes, and is idle within its timeline's makespan."""

    rank: int
    predicted_busy: float
    measured_busy: float
    predicted_idle: float
    measured_idle: float


class Move(NamedTuple):
    """The first place at which a rank's order differs: ``measured`` stands where ``predicted`` was expected."""

    rank: int
    position: int
    predicted: Instruction
    measured: Instruction


@dataclass(frozen=True, slots=True)
class TimelineDiff:
    """The differences of ``measured`` from ``predicted``.

    Attributes:
        predicted_unit: of the predicted times.
        measured_unit: of the measured times.
        predicted_makespan: first start to last end.
        measured_makespan: the same, measured.
        predicted_bubble: idle share of the total.
        measured_bubble: the same, measured.
        kinds: one entry per kind in either.
        ranks: one entry per rank.
        missing: (rank, instruction) that only the prediction has.
        extra: (rank, instruction) that only the measurement has.
        moves: per rank and lane the first change of order among instructions that both have.
    """

    predicted_unit: str
    measured_unit: str
    predicted_makespan: float
    measured_makespan: float
    predicted_bubble: float
    measured_bubble: float
    kinds: tuple[KindDiff, ...]
    ranks: tuple[RankDiff, ...]
    missing: tuple[tuple[int, Instruction], ...]
    extra: tuple[tuple[int, Instruction], ...]
    moves: tuple[Move, ...]

    @property
    def makespan_ratio(self) -> float | None:
        """Measured over predicted makespan; None where the units differ or nothing was predicted."""
        if self.predicted_unit != self.measured_unit or not self.predicted_makespan:
            return None
        return self.measured_makespan / self.predicted_makespan

    @property
    def same_program(self) -> bool:
        """Whether both did the same in the same order on every rank."""
        return not (self.missing or self.extra or self.moves)


def diff(predicted: Timeline, measured: Timeline) -> TimelineDiff:
    """Compare two timelines over all ranks of either.

    >>> from chimera.ir.action import Action
    >>> spans = [(0, 0, Action(Kind.F, 0, 0), 0.0, 1.0), (0, 0, Action(Kind.B, 0, 0), 1.0, 3.0)]
    >>> slower = [(0, 0, Action(Kind.F, 0, 0), 0.0, 1.5), (0, 0, Action(Kind.B, 0, 0), 2.0, 4.5)]
    >>> found = diff(Timeline.from_spans(spans, num_ranks=1), Timeline.from_spans(slower, num_ranks=1))
    >>> found.makespan_ratio, found.kinds[1].measured, found.same_program
    (1.5, 2.5, True)
    """
    both_have = _WORK | {lane for lane in Lane if (predicted.lane == lane).any() and (measured.lane == lane).any()}
    missing, extra, moves = [], [], []
    for rank in range(max(predicted.num_ranks, measured.num_ranks)):
        for lane in sorted(both_have):
            expected, found = _order(predicted, rank, lane), _order(measured, rank, lane)
            only_expected, only_found = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
            missing += [(rank, instruction) for instruction in only_expected.elements()]
            extra += [(rank, instruction) for instruction in only_found.elements()]
            if lane in _WORK:
                moves += _first_move(rank, expected, found)
    return TimelineDiff(
        predicted_unit=predicted.unit,
        measured_unit=measured.unit,
        predicted_makespan=predicted.makespan,
        measured_makespan=measured.makespan,
        predicted_bubble=predicted.bubble_fraction,
        measured_bubble=measured.bubble_fraction,
        kinds=_kinds(predicted, measured, both_have),
        ranks=_ranks(predicted, measured),
        missing=tuple(missing),
        extra=tuple(extra),
        moves=tuple(moves),
    )


def _order(timeline: Timeline, rank: int, lane: Lane) -> list[Instruction]:
    if rank >= timeline.num_ranks:
        return []
    spans = sorted((s for s in timeline.spans(rank) if s.lane is lane), key=lambda span: span.start)
    return [span.action for span in spans]


def _first_move(rank: int, expected: list[Instruction], found: list[Instruction]) -> list[Move]:
    shared = Counter(expected) & Counter(found)
    places = []
    for order in (expected, found):
        left = shared.copy()
        kept = []
        for position, instruction in enumerate(order):
            if left[instruction] > 0:
                left[instruction] -= 1
                kept.append((position, instruction))
        places.append(kept)
    for (_, want), (position, got) in zip(*places, strict=True):
        if want != got:
            return [Move(rank, position, want, got)]
    return []


def _kinds(predicted: Timeline, measured: Timeline, lanes: frozenset[Lane]) -> tuple[KindDiff, ...]:
    times = [timeline.time_by_kind() for timeline in (predicted, measured)]
    counts = [np.bincount(timeline.table.kind, minlength=len(Kind)).tolist() for timeline in (predicted, measured)]
    used = [np.bincount(t.table.kind[np.isin(t.lane, list(lanes))], minlength=len(Kind)) for t in (predicted, measured)]
    return tuple(
        KindDiff(kind, times[0].get(kind, 0.0), times[1].get(kind, 0.0), counts[0][kind], counts[1][kind])
        for kind in Kind
        if used[0][kind] or used[1][kind]
    )


def _ranks(predicted: Timeline, measured: Timeline) -> tuple[RankDiff, ...]:
    found = []
    for rank in range(max(predicted.num_ranks, measured.num_ranks)):
        busy = [float(t.busy[rank]) if rank < t.num_ranks else 0.0 for t in (predicted, measured)]
        idle = [t.makespan - b for t, b in zip((predicted, measured), busy, strict=True)]
        found.append(RankDiff(rank, busy[0], busy[1], idle[0], idle[1]))
    return tuple(found)
