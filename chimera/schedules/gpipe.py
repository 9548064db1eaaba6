"""GPipe: all forwards, then all backwards.

It knows the order of one rank; it refuses to know costs, messages and reductions.
"""

from chimera.ir.action import Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Schedule
from chimera.schedules.building import actions, linear, require_counts

__all__ = ["gpipe"]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Build GPipe's schedule: every rank runs its ``microbatches`` forwards and then its backwards.

    >>> for row in gpipe(3, 4).to_text():
    ...     print(row)
    0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3

    Bubble: (p−1)/(m+p−1) of the total time, (p−1)/m of the ideal time. Activations: m on every rank, in units of one
    stage's activations of one micro-batch. Works for any p ≥ 1 and m ≥ 1.

    Source: Huang et al., GPipe, NeurIPS 2019 (arXiv 1811.06965), §2.3. The backwards run in the order of the forwards,
    so that every channel carries its messages in one order.

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m per step.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("gpipe", ranks=ranks, microbatches=microbatches)
    with collector_paused():
        programs = tuple(
            (
                *actions(Kind.F, [rank] * microbatches, range(microbatches)),
                *actions(Kind.B, [rank] * microbatches, range(microbatches)),
            )
            for rank in range(ranks)
        )
    return Schedule("gpipe", linear(ranks), (0,) * microbatches, programs)
