"""GEMS: two pipelines in opposite directions that take turns, one micro-batch each in flight.

It knows the order of one rank; it refuses to know costs, messages and reductions.
"""

from chimera.ir.action import Action, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.building import require_counts

__all__ = ["gems"]


def gems(ranks: int, microbatches: int) -> Schedule:
    """Build GEMS' schedule: micro-batches take turns down and up the ranks, each behind the backward of the one before.

    >>> for row in gems(3, 4).to_text():
    ...     print(row)
    0F0 0B0 2F1 2B1 0F2 0B2 2F3 2B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    2F0 2B0 0F1 0B1 2F2 2B2 0F3 0B3

    The backward of a micro-batch ends on the rank where the next one begins, which follows it rank by rank: the step
    takes m·p·B + p·F + (m−1)·F for F ≤ B. Memory is all it saves.

    Bubble: near (p−1)/(p+½) of the total time for B = 2F and many micro-batches, whatever m is. Activations: 1 on
    every rank, in units of one stage's activations of one micro-batch. Weights: 2 stages per rank; 1 on the middle
    one of an odd number. Works for any p ≥ 1 and m ≥ 1.

    Source: Jain et al., GEMS, SC 2020; as drawn by Li and Hoefler, SC 2021 (arXiv 2107.06925), §2.

    Args:
        ranks: pipeline ranks p.
        microbatches: micro-batches m per step, over both directions.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("gems", ranks=ranks, microbatches=microbatches)
    down = tuple(range(ranks))
    routes = (down, down[::-1])
    microbatch_to_route = tuple(microbatch % 2 for microbatch in range(microbatches))
    with collector_paused():
        programs = tuple(
            tuple(
                Action(kind, routes[route][rank], microbatch)  # the mirror image is its own inverse
                for microbatch, route in enumerate(microbatch_to_route)
                for kind in (Kind.F, Kind.B)
            )
            for rank in range(ranks)
        )
    return Schedule("gems", Placement(ranks, routes), microbatch_to_route, programs)
