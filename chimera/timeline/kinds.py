"""How long actions of each kind were predicted to take and how long they took, over all ranks and several steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import RECEIVES, Kind
from chimera.ir.timeline import Timeline

__all__ = ["KindTimes", "times_of_kinds"]


class KindTimes(NamedTuple):
    """Times of one kind's actions in the timelines' unit; a pair's time counts half to each of its two.

    ``spread`` is the standard deviation of the measured times, ``number`` how many there are in a step.
    """

    kind: Kind
    number: int
    predicted: float
    measured: float
    spread: float

    @property
    def error(self) -> float | None:
        """By how much the prediction is off the measured mean, as a share of that; None where nothing was measured."""
        return self.predicted / self.measured - 1.0 if self.measured else None


def times_of_kinds(predicted: Timeline, measured: Sequence[Timeline]) -> tuple[KindTimes, ...]:
    """Compare mean times per kind; a message counts once, by its send.

    >>> from chimera.ir.action import Action
    >>> def lasting(seconds):
    ...     return Timeline.from_spans([(0, 0, Action(Kind.F, 0, 0), 0.0, seconds)], num_ranks=1)
    >>> times_of_kinds(lasting(2.0), [lasting(1.5), lasting(2.5)])
    (KindTimes(kind=<Kind.F: 0>, number=1, predicted=2.0, measured=2.0, spread=0.5),)
    """
    found = []
    for kind in Kind:
        if kind in RECEIVES:
            continue
        expected = _times(predicted, kind)
        seen = [_times(timeline, kind) for timeline in measured]
        together = np.concatenate(seen) if seen else np.empty(0)
        if len(together):
            found.append(
                KindTimes(
                    kind,
                    len(seen[0]),
                    float(expected.mean()) if len(expected) else 0.0,
                    float(together.mean()),
                    float(together.std()),
                )
            )
    return tuple(found)


def _times(timeline: Timeline, kind: Kind) -> NDArray[np.float64]:
    rows = timeline.table.kind == kind
    share = np.where(timeline.table.paired[rows], 0.5, 1.0)
    times: NDArray[np.float64] = (timeline.end[rows] - timeline.start[rows]) * share
    return times
