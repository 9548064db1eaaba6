"""What a pipeline checks and works out before it runs: the proved and lowered schedule, the cut, the channels."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from chimera.errors import ScheduleError, UsageError
from chimera.ir.action import COMMUNICATIONS, COMPUTATIONS, Kind, Overlap, flatten
from chimera.ir.checks import check
from chimera.ir.schedule import Placement, Schedule
from chimera.passes.derived import pairs_apart
from chimera.passes.lower import lower
from chimera.passes.reductions import ReductionMode
from chimera.runtime.groups import Channel

__all__ = ["channels_of", "check_cut", "runnable"]

_RUNS = COMPUTATIONS | COMMUNICATIONS | {Kind.REDUCE_GRAD}


def runnable(schedule: Schedule, reduce: ReductionMode, *, together: Callable[[Overlap], bool]) -> Schedule:
    """Return the schedule as it runs: proved, with messages and reductions.

    Pairs stay those that are run ``together``, by a form of their own; others become a forward, then a backward.
    """
    for rank, program in enumerate(schedule.actions):
        for position, action in enumerate(flatten(program)):
            if action.kind not in _RUNS:
                raise ScheduleError(
                    f"rank {rank}, position {position}: {action} is of kind {action.kind.name}, which this runtime "
                    f"does not run; it runs {', '.join(sorted(kind.name for kind in _RUNS))}"
                )
    schedule = pairs_apart(schedule, keep=together)
    if schedule.is_lowered:
        check(schedule)
        return schedule
    return lower(schedule, reduce=reduce)


def check_cut(layer_to_stage: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Refuse a cut that leaves out a layer or a stage, or goes back."""
    ascending = list(layer_to_stage) == sorted(layer_to_stage)
    if len(layer_to_stage) != num_layers or not ascending or set(layer_to_stage) != set(range(num_stages)):
        raise UsageError(
            f"layer_to_stage is {list(layer_to_stage)}; needed: for {num_layers} layers, stages 0…{num_stages - 1} in "
            "ascending order, none left out"
        )


def channels_of(placement: Placement) -> set[Channel]:
    """Return every edge between ranks that a route crosses, both ways."""
    edges = {(a, b, number) for number, route in enumerate(placement.routes) for a, b in pairwise(route) if a != b}
    return edges | {(b, a, number) for a, b, number in edges}
