"""The cut of a model's layers into stages: contiguous, none empty, the heaviest stage as light as can be."""

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
    # best[n] = (heaviest stage, sum of squares, layers of each stage) over the cuts of the first n layers.
    best: list[tuple[float, float, tuple[int, ...]]] = [
        (before[n], before[n] ** 2, (n,)) for n in range(num_layers + 1)
    ]
    for stage in range(1, num_stages):
        longer = list(best)
        for n in range(stage + 1, num_layers + 1):
            longer[n] = min(
                (
                    (max(heaviest, load), squares + load**2, (*counts, n - start))
                    for start in range(stage, n)
                    for heaviest, squares, counts in [best[start]]
                    for load in [before[n] - before[start]]
                ),
                # Equal cuts: the longer stages first.
                key=lambda cut: (cut[0], cut[1], tuple(-count for count in cut[2])),
            )
        best = longer
    return tuple(stage for stage, count in enumerate(best[num_layers][2]) for _ in range(count))
