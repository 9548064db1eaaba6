"""1F1B with flush, also called PipeDream-Flush or DAPPLE: GPipe's time at a bounded number of micro-batches in flight.

It knows the order of one rank; it refuses to know costs, messages and reductions.
"""

from chimera.ir.action import Action, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Schedule
from chimera.schedules.building import actions, linear, merge_1f1b, require_counts

__all__ = ["one_f_one_b", "program_1f1b"]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Build the 1F1B schedule: after p − rank − 1 warm-up forwards each rank alternates forward and backward.

    >>> for row in one_f_one_b(4, 6).to_text():
    ...     print(row)
    0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
    3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5

    Bubble: (p−1)/(m+p−1) of the total time, (p−1)/m of the ideal time. Activations: min(m, p − rank), in units of one
    stage's activations of one micro-batch. Works for any p ≥ 1 and m ≥ 1.

    Source: Narayanan et al., SC 2021 (arXiv 2104.04473), §2.2.1; Fan et al., DAPPLE, PPoPP 2021 (arXiv 2007.01045).

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m per step.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("1f1b", ranks=ranks, microbatches=microbatches)
    with collector_paused():
        programs = tuple(program_1f1b(ranks, rank, microbatches) for rank in range(ranks))
    return Schedule("1f1b", linear(ranks), (0,) * microbatches, programs)


def program_1f1b(ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """Return the program of ``rank``, which runs the stage of the same number."""
    stages = [rank] * microbatches
    forwards = actions(Kind.F, stages, range(microbatches))
    backwards = actions(Kind.B, stages, range(microbatches))
    return tuple(merge_1f1b(forwards, backwards, warmup=ranks - rank - 1))
