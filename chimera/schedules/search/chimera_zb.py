"""``chimera-zb``: Chimera's bidirectional placement with split backward, ordered by the list scheduler.

It knows the question it asks; the order is found, the same at every call. It refuses to know costs: F = I = W.
"""

from typing import Final

from chimera.errors import UsageError
from chimera.ir.schedule import Schedule
from chimera.schedules.building import require_counts
from chimera.schedules.search.placements import dealt, place
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.searching import search

__all__ = ["chimera_zb"]

_EFFORT: Final = 30_000
"""Enough where no short list of rules meets the bound, and fast; most sizes take one rule."""


def chimera_zb(ranks: int, microbatches: int, pairs: int = 1) -> Schedule:
    """Build Chimera's placement, 2f = 2·``pairs`` routes, with the backward split into I and W where that helps.

    >>> for row in chimera_zb(4, 4).to_text():
    ...     print(row)
    0F0 0F2 3F1 3I1 3W1 3F3 3I3 0B0 0B2 3W3
    1F0 2F1 1F2 2F3 2I1 1I0 1W0 2I3 1I2 2W1 1W2 2W3
    1F1 2F0 1F3 2F2 2I0 1I1 2W0 2I2 1I3 1W1 2W2 1W3
    0F1 0F3 3F0 3I0 3W0 3F2 3I2 0B1 0B3 3W2

    Micro-batches are dealt to the routes in turn. Makespan at F = I = W = 1 without communication: 3m + p/2 − 1 for
    f = 1 and even m ≥ p, the placement's lower bound: the two middle ranks cannot start before p/2 − 1 forwards, and
    have computations of 3m. Bubble (p/2 − 1)/(3m + p/2 − 1) of the total. In general 3m + p/(2f) − 1 for m a multiple
    of p. Activations: at most p per rank, as Chimera's, in units of one stage's activations of one micro-batch.
    Weights: 2f stages per rank.

    Source: placement Li and Hoefler, SC 2021 (arXiv 2107.06925), §3; split backward Qi et al., Zero Bubble, ICLR 2024;
    the order is ours, found by ``search``.

    Args:
        ranks: pipeline ranks p, even.
        microbatches: micro-batches m per step, over all routes.
        pairs: pairs of opposite pipelines f, a divisor of p/2.

    Raises:
        UsageError: a count is below 1, p is odd, or f does not divide p/2.
    """
    require_counts("chimera-zb", ranks=ranks, microbatches=microbatches, pairs=pairs)
    try:
        placement = place("bidirectional", ranks, pairs=pairs)
    except UsageError as error:
        # The placement is refused by Chimera's name; what it says of the sizes holds as it stands.
        raise UsageError(str(error).replace("chimera:", "chimera-zb:", 1)) from error
    problem = Problem.uniform(placement, dealt(microbatches, len(placement.routes)), float(ranks))
    return search(problem, name="chimera-zb", effort=_EFFORT).schedule
