"""The published schedules that answer the same question: same placement, within the cap, same micro-batches.

They stand in for the search where they beat it, and say how good it is. Whatever the registry holds is asked but what
is itself searched for the problem's costs; a schedule that refuses the sizes is passed over.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chimera.errors import ChimeraError
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.chimera import UNITS
from chimera.schedules.registry import SCHEDULES, ScheduleFamily
from chimera.schedules.search.problem import Problem

__all__ = ["published"]


def published(problem: Problem) -> Iterator[Schedule]:
    """Yield every schedule of the registry that the problem allows, under its own name."""
    for family in SCHEDULES.values():
        if family.takes_costs:
            continue
        for options in _options(family, problem.placement):
            schedule = _built(family, problem, options)
            if schedule is not None and problem.is_answered_by(schedule):
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
