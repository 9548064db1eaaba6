"""BitPipe: V-shaped pipelines in both directions over the same ranks, Chimera's bubbles at half the size.

It knows the placement, the slot in which each micro-batch starts, and how units follow one another. It refuses to know
costs, messages and reductions.
"""

from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.building import require_counts, require_even_ranks, slot_programs, wave_route

__all__ = ["bitpipe"]


def bitpipe(ranks: int, microbatches: int, waves: int = 1) -> Schedule:
    """Build BitPipe's schedule: two routes of 2·w·p stages, one down and up the ranks, the other its mirror image.

    >>> for row in bitpipe(2, 2).to_text():
    ...     print(row)
    0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0
    0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1

    With equal slots for F and B a unit of p micro-batches, half of them on each route and one started every second
    slot there, fills 4·w·p slots of each rank without a gap. The last unit may be partial; its micro-batches are dealt
    to the two routes evenly.

    Bubble for F = B: (p−2)/(4wm+p−2) of the total time, for m a multiple of p; for B = 2F the makespan is
    3m + (p−2)(m/p+1)/(2w). A partial unit fills and drains like a whole one. Activations: min(m, p) at most, in units
    of 1/p of the model for one micro-batch. Weights: 2, in units of 1/p of the model. Works for any even p, any w and
    any m ≥ 1.

    Source: Wu et al., BitPipe, 2024 (arXiv 2410.19367), §3; direct concatenation of units, without early forwarding.
    More than one wave is ours.

    Args:
        ranks: pipeline ranks p, even.
        microbatches: micro-batches m per step, over both routes.
        waves: times w that a route goes down and up; the paper's is 1.

    Raises:
        UsageError: a count is below 1, or p is odd.
    """
    require_counts("bitpipe", ranks=ranks, microbatches=microbatches, waves=waves)
    require_even_ranks("bitpipe", ranks)
    down = wave_route(ranks, waves)
    placement = Placement(ranks, (down, tuple(ranks - 1 - rank for rank in down)))
    microbatch_to_route: list[int] = []
    starts: list[int] = []
    for unit, first in enumerate(range(0, microbatches, ranks)):
        size = min(ranks, microbatches - first)
        for route, count in enumerate((size - size // 2, size // 2)):
            microbatch_to_route += [route] * count
            starts += [2 * placement.num_stages * unit + 2 * j for j in range(count)]
    programs = slot_programs(placement, microbatch_to_route, starts)
    return Schedule("bitpipe", placement, tuple(microbatch_to_route), programs)
