"""The list scheduler on the best layouts: an order of the same computations, for their real costs, within the memory.

Refines steps that were simulated whole; a folded step has too many micro-batches for an order of its own, and its
bubble is small.
"""

from typing import Final

from chimera.errors import InfeasibleError
from chimera.ir.schedule import Schedule
from chimera.passes.derived import compute_only
from chimera.passes.reductions import reducing
from chimera.plan.estimate import Estimate
from chimera.plan.plans import Plan
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.searching import search
from chimera.simulate import simulate

__all__ = ["MOST_COMPUTATIONS", "refined"]

MOST_COMPUTATIONS: Final = 12_000
"""Of a step that is ordered anew."""

_ORDERS: Final = 40
"""Orders that are tried beyond the first rules."""

_GAIN: Final = 1e-3
"""Share of the step that a new order has to save: less is not worth a file."""


def refined(estimate: Estimate) -> Plan:
    """Return the plan of a layout, with a faster order where the list scheduler finds one."""
    published = Plan(estimate=estimate, step_s=estimate.step_s)
    schedule = compute_only(estimate.schedule)
    whole = estimate.layout.microbatches * schedule.microbatch_share
    if schedule.num_ranks == 1 or schedule.num_microbatches != estimate.layout.microbatches or whole != int(whole):
        return published
    computations = 3 * schedule.num_stages * schedule.num_microbatches
    if computations > MOST_COMPUTATIONS:
        return published
    try:
        problem = Problem(
            schedule.placement,
            schedule.microbatch_to_route,
            estimate.costs,
            memory_limit_bytes=_room(estimate),
            microbatch_share=schedule.microbatch_share,
        )
    except InfeasibleError:  # the room of the fullest rank is counted for all
        return published
    found = search(problem, name=f"{schedule.name}-ordered", effort=_ORDERS * computations, alternatives=(schedule,))
    step_s = estimate.step_s - _makespan(estimate, schedule) + _makespan(estimate, found.schedule)
    if step_s > estimate.step_s * (1 - _GAIN):
        return published
    return Plan(estimate=estimate, step_s=step_s, order=found.schedule)


def _room(estimate: Estimate) -> float:
    """Return the bytes that activations may take on every rank; what is lost around them is lost as before."""
    device = estimate.cluster.device.memory_bytes
    return min(
        (device - memory.total) / (1 + memory.margin / memory.total) + memory.activations for memory in estimate.memory
    )


def _makespan(estimate: Estimate, schedule: Schedule) -> float:
    """Return the time of an order with the estimate's costs, reductions included where they overlap."""
    if estimate.costs.reduce_s is not None:
        schedule = reducing(schedule, "eager")
    return simulate(schedule, estimate.costs).makespan
