"""The cut of a model's layers into stages: contiguous, none empty, the heaviest stage as light as can be."""

import math
from collections.abc import Sequence
from itertools import accumulate

from chimera.errors import UsageError

__all__ = ["partition"]


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the stage of each layer.

    Among the cuts with the least heaviest stage, the one with the least sum of squared stage costs is taken, so equal
    costs give counts that differ by at most one.

    >>> partition([1, 1, 1, 1, 1], 2)
    (0, 0, 0, 1, 1)
    >>> partition([1, 1, 1, 3], 2)
    (0, 0, 0, 1)

    Args:
        costs: the cost of each layer, in any one unit.
        num_stages: stages to cut into.

    Raises:
        UsageError: more stages than layers.
    """
    num_layers = len(costs)
    if num_stages > num_layers:
        raise UsageError(
            f"got {num_stages} stages for {num_layers} layers; needed: at least one layer per stage; take a schedule "
            f"with at most {num_layers} stages (fewer ranks or chunks), or a deeper model"
        )
    before = [0.0, *accumulate(costs)]
    # Equal sums of unequal costs may differ in their last bits.
    limit = _lightest_heaviest(before, num_stages) * (1 + 1e-9)
    # best[n] = (sum of squares, minus the layers of each stage) over the cuts of the first n layers within the limit;
    # of equal sums the smallest tuple has the longer stages first.
    best = [_one_stage(load, n, limit) for n, load in enumerate(before)]
    for stage in range(1, num_stages):
        longer = [_NONE] * (num_layers + 1)
        for n in range(stage + 1, num_layers + 1):
            longer[n] = min(
                (best[start][0] + load**2, (*best[start][1], start - n))
                for start in range(stage, n)
                for load in [before[n] - before[start]]
                if load <= limit
            )
        best = longer
    return tuple(stage for stage, count in enumerate(best[num_layers][1]) for _ in range(-count))


_Cut = tuple[float, tuple[int, ...]]
_NONE: _Cut = (math.inf, ())


def _one_stage(load: float, num_layers: int, limit: float) -> _Cut:
    return (load**2, (-num_layers,)) if load <= limit else _NONE


def _lightest_heaviest(before: Sequence[float], num_stages: int) -> float:
    """Return the cost of the heaviest stage of the best cut; ``before[n]`` is the cost of the first n layers."""
    best = list(before)
    for stage in range(1, num_stages):
        for n in range(len(before) - 1, stage, -1):
            best[n] = min(max(best[start], before[n] - before[start]) for start in range(stage, n))
    return best[-1]
