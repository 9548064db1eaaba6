"""The published schedules by name: finding one, holding the options against what it takes, building it.

What each schedule is stands in ``families``. The registry knows no orders and no costs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from chimera.errors import UsageError, nearest_names
from chimera.ir.schedule import Schedule
from chimera.schedules.building import as_option, require_counts
from chimera.schedules.families import FAMILIES, ScheduleFamily
from chimera.simulate.simulator import CostModel

__all__ = ["SCHEDULES", "ScheduleFamily", "build_schedule"]

SCHEDULES: Final[Mapping[str, ScheduleFamily]] = MappingProxyType({family.name: family for family in FAMILIES})
"""Every schedule that can be built, by name."""


def build_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    pairs: int | None = None,
    unit: str | None = None,
    waves: int | None = None,
    updates: int | None = None,
    costs: CostModel | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """Build a schedule by name; an option left out takes the default of the schedule.

    >>> build_schedule("chimera", ranks=8, microbatches=16, pairs=2).num_stages
    8
    >>> build_schedule("gpipe", ranks=4, microbatches=8, unit="double")
    Traceback (most recent call last):
    chimera.errors.UsageError: gpipe takes no --unit, got double; leave it out, or choose a schedule that takes it: \
chimera

    Args:
        name: a key of ``SCHEDULES``.
        ranks: pipeline ranks p.
        microbatches: micro-batches m per step, over all routes.
        chunks: model chunks v per rank.
        pairs: pairs of opposite pipelines f.
        unit: how Chimera makes a step of more than p micro-batches.
        waves: times w that a route goes down the ranks and up again.
        updates: updates k of an asynchronous schedule.
        costs: what the order is made for, where it is made for costs.
        memory_limit: most activations per rank that such an order holds, in units of 1/p of the model for one
            micro-batch.

    Raises:
        UsageError: the name is unknown, the schedule does not take an option, or it cannot take a value; the message
            gives the nearest ones.
        InfeasibleError: no order holds as little as ``memory_limit``.
    """
    family = SCHEDULES.get(name)
    if family is None:
        raise UsageError(
            f"no schedule is named {name!r}{nearest_names(name, SCHEDULES)}; known: {', '.join(SCHEDULES)}"
        )
    require_counts(name, ranks=ranks, microbatches=microbatches)
    given = {
        "chunks": chunks,
        "pairs": pairs,
        "unit": unit,
        "waves": waves,
        "updates": updates,
        "costs": costs,
        "memory_limit": memory_limit,
    }
    options = {option: value for option, value in given.items() if value is not None}
    for option, value in options.items():
        if option not in family.options:
            takers = ", ".join(other.name for other in FAMILIES if option in other.options)
            raise UsageError(
                f"{name} takes no {as_option(option)}, got {value}; leave it out, or choose a schedule that takes it: "
                f"{takers}"
            )
    return family.build(ranks, microbatches, **options)
