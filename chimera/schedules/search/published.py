"""The published schedules that answer the same question: same placement, within the cap, same micro-batches.

They stand in for the search where they beat it, and say how good it is. Whatever the registry holds is asked; a
schedule that refuses the sizes is passed over.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chimera.errors import ChimeraError
from chimera.ir.memory import peak_activations
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.chimera import UNITS
from chimera.schedules.registry import SCHEDULES, ScheduleFamily
from chimera.schedules.search.problem import Problem
from chimera.simulate import simulate

__all__ = ["answers", "published"]


def published(problem: Problem) -> Iterator[Schedule]:
    """Yield every schedule of the registry that the problem allows, under its own name."""
    for family in SCHEDULES.values():
        for options in _options(family, problem.placement):
            schedule = _built(family, problem, options)
            if schedule is not None and answers(schedule, problem):
                unit = options.get("unit", UNITS[0])
                yield schedule if unit == UNITS[0] else replace(schedule, name=f"{schedule.name} --unit {unit}")


def _options(family: ScheduleFamily, placement: Placement) -> Iterator[dict[str, Any]]:
    """Yield the options with which a family may have the placement; the default ones for those not named here."""
    chunks, rest = divmod(placement.num_stages, placement.num_ranks)
    sizes = {"chunks": chunks, "waves": chunks // 2, "pairs": len(placement.routes) // 2}
    options = {name: value for name, value in sizes.items() if name in family.options}
    if rest or not all(options.values()):
        return
    if "unit" not in family.options:
        yield options
        return
    for unit in UNITS:
        yield {**options, "unit": unit}


def _built(family: ScheduleFamily, problem: Problem, options: dict[str, Any]) -> Schedule | None:
    """Build a family's schedule in the problem's sizes; None where it takes other ones."""
    placement = problem.placement
    try:
        # Few micro-batches tell the placement; the whole step is built only where it fits.
        if family.build(placement.num_ranks, 2 * placement.num_ranks, **options).placement != placement:
            return None
        return family.build(placement.num_ranks, len(problem.microbatch_to_route), **options)
    except ChimeraError:
        return None


def answers(schedule: Schedule, problem: Problem) -> bool:
    """Return whether the schedule is synchronous, of the same micro-batches, and within the cap."""
    same = (
        schedule.placement == problem.placement
        and schedule.microbatch_share == problem.microbatch_share
        and Counter(schedule.microbatch_to_route) == Counter(problem.microbatch_to_route)
        and not schedule.is_asynchronous
    )
    if not same:
        return False
    if problem.memory_limit_bytes is not None:
        peaks = simulate(schedule, problem.costs).peak_bytes
        return peaks is not None and max(peaks) <= problem.memory_limit_bytes + problem.memory_tolerance
    limit = problem.memory_limit
    return limit is None or max(peak_activations(schedule)) <= limit + problem.memory_tolerance
