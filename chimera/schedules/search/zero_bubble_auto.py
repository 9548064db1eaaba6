"""``zb-1p`` and ``zb-2p``: Zero Bubble's automatic schedules, made for given costs within a memory limit.

The paper's own heuristic fills each rank with forwards, then turns, and grid-searches two choices; here the list
scheduler does, which tries many more rules and also knows the hand-made schedules, so that it is never worse than they
are. The module knows the question; it refuses to know orders.
"""

from typing import Final

from chimera.ir.costs import Costs
from chimera.ir.schedule import Schedule
from chimera.schedules.building import linear, require_counts
from chimera.schedules.one_f_one_b import one_f_one_b
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.searching import search
from chimera.schedules.zero_bubble import zb_h1, zb_h2
from chimera.simulate.simulator import CostModel

__all__ = ["zb_1p", "zb_2p"]

_EFFORT: Final = 600_000
"""Computations to put in order: with it every published rate is met; about a second of compiled code."""


def zb_1p(ranks: int, microbatches: int, costs: CostModel | None = None, memory_limit: float | None = None) -> Schedule:
    """Build ZB-1p: the order of least span for given costs, within 1F1B's memory.

    >>> from chimera.ir.costs import Costs
    >>> for row in zb_1p(3, 4, costs=Costs(forward=2, backward=5, weight_grad=2)).to_text():
    ...     print(row)
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1F2 1I0 1W0 1I1 1W1 1F3 1I2 1W2 1I3 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Bubble, on the span's clock: what the costs and the limit leave; never more than ZB-H1's (p−1)(F+I−W).
    Activations: at most p, or ``memory_limit``, in units of 1/p of the model for one micro-batch; where the costs say
    that W needs a share of them only (``held_for_weight_grad``), the rest goes at I. Weights: 1. Works for any p ≥ 1
    and m ≥ 1.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), §3; the order is ours, found by
    ``search``.

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m per step.
        costs: times of every computation and message; F = I = W and free messages without.
        memory_limit: most activations per rank, in units of 1/p of the model for one micro-batch; p without.

    Raises:
        UsageError: a count is below 1, the limit is no number above 0, or the costs are of another number of stages.
        InfeasibleError: no order holds as little as the limit.
    """
    return _automatic("zb-1p", ranks, microbatches, costs, float(ranks) if memory_limit is None else memory_limit)


def zb_2p(ranks: int, microbatches: int, costs: CostModel | None = None, memory_limit: float | None = None) -> Schedule:
    """Build ZB-2p: the order of least span for given costs, within twice 1F1B's memory.

    >>> from chimera.ir.costs import Costs
    >>> for row in zb_2p(3, 6, costs=Costs(forward=2, backward=5, weight_grad=2)).to_text():
    ...     print(row)
    0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1F5 1I3 1W0 1I4 1W1 1I5 1W2 1W3 1W4 1W5
    2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2F5 2I5 2W0 2W1 2W2 2W3 2W4 2W5

    Bubble, on the span's clock: what the costs and the limit leave, often nothing; never more than ZB-H2's
    (p−1)(F+I−2W). A rank that starts t later than the first ends as much later, and fills that time with W's that it
    held back. Activations: at most 2p, or ``memory_limit``, in units of 1/p of the model for one micro-batch; where the
    costs say that W needs a share of them only (``held_for_weight_grad``), the rest goes at I. Weights: 1. Works for
    any p ≥ 1 and m ≥ 1.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), §3; the order is ours, found by
    ``search``.

    Args:
        ranks: pipeline ranks p, one stage each.
        microbatches: micro-batches m per step.
        costs: times of every computation and message; F = I = W and free messages without.
        memory_limit: most activations per rank, in units of 1/p of the model for one micro-batch; 2p without.

    Raises:
        UsageError: a count is below 1, the limit is no number above 0, or the costs are of another number of stages.
        InfeasibleError: no order holds as little as the limit.
    """
    return _automatic("zb-2p", ranks, microbatches, costs, 2.0 * ranks if memory_limit is None else memory_limit)


def _automatic(name: str, ranks: int, microbatches: int, costs: CostModel | None, memory_limit: float) -> Schedule:
    """Search the linear placement; the schedules made by hand stand in where they fit and are better."""
    require_counts(name, ranks=ranks, microbatches=microbatches)
    times = Costs(forward=1.0, backward=2.0) if costs is None else costs
    problem = Problem(linear(ranks), (0,) * microbatches, times, memory_limit)
    by_hand = (build(ranks, microbatches) for build in (one_f_one_b, zb_h1, zb_h2))
    alternatives = (schedule for schedule in by_hand if problem.is_answered_by(schedule))
    return search(problem, objective="span", name=name, effort=_EFFORT, alternatives=alternatives).schedule
