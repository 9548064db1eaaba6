"""Hanayo: one pipeline whose stages go down the ranks and up again in waves, with a single copy of the weights.

It knows the placement, the slot in which each micro-batch starts, and how units follow one another. It refuses to know
costs, messages and reductions.
"""

from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.building import require_counts, slot_programs, wave_route

__all__ = ["hanayo"]


def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Schedule:
    """Build Hanayo's schedule with w = ``waves``: 2·w·p stages, each wave once down the ranks and once up.

    >>> for row in hanayo(2, 2).to_text():
    ...     print(row)
    0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

    With equal slots for F and B a unit of p micro-batches, one started every second slot, fills 4·w·p slots of each
    rank without a gap, so that units follow one another directly. The last unit may be partial.

    Bubble for F = B: (p−1)/(2wm+p−1) of the total time, (p−1)/(2wm) of the ideal time, for m a multiple of p; for
    B = 2F the units fit less closely, and the makespan is 3m + (p−1)(m/p+1)/w. A partial unit fills and drains like a
    whole one. Activations: min(m, p) at most, in units of 1/p of the model for one micro-batch. Weights: 1. Works for
    any p, w and m ≥ 1.

    Source: Liu et al., Hanayo, SC 2023 (arXiv 2308.15762), §3. The slots are ours: Chimera's rule on the wave.

    Args:
        ranks: pipeline ranks p.
        microbatches: micro-batches m per step.
        waves: waves w.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("hanayo", ranks=ranks, microbatches=microbatches, waves=waves)
    placement = Placement(ranks, (wave_route(ranks, waves),))
    route = (0,) * microbatches
    unit = 2 * placement.num_stages
    starts = [m // ranks * unit + 2 * (m % ranks) for m in range(microbatches)]
    return Schedule("hanayo", placement, route, slot_programs(placement, route, starts))
