"""What a pipeline checks and works out before it runs: the proved and lowered schedule, cut, channels, recompute."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

from torch import nn

from chimera.errors import ScheduleError, UsageError, nearest_names
from chimera.ir.action import COMMUNICATIONS, COMPUTATIONS, Kind, flatten
from chimera.ir.checks import check
from chimera.ir.schedule import Placement, Schedule
from chimera.passes.lower import lower
from chimera.passes.reductions import ReductionMode
from chimera.runtime.groups import Channel
from chimera.tensor.recompute import RecomputeMode, recompute_cores

__all__ = ["channels_of", "check_cut", "prepare_recompute", "runnable"]

_RUNS = COMPUTATIONS | COMMUNICATIONS | {Kind.REDUCE_GRAD}


def runnable(schedule: Schedule, reduce: ReductionMode) -> Schedule:
    """Return the schedule as it runs: proved, with messages and reductions, a pair as its F and then its B."""
    for rank, program in enumerate(schedule.actions):
        for position, action in enumerate(flatten(program)):
            if action.kind not in _RUNS:
                raise ScheduleError(
                    f"rank {rank}, position {position}: {action} is of kind {action.kind.name}, which this runtime "
                    f"does not run; it runs {', '.join(sorted(kind.name for kind in _RUNS))}"
                )
    if schedule.is_lowered:
        check(schedule)
    else:
        schedule = lower(schedule, reduce=reduce)
    # Less strict than the pair, which waits for both inputs at once: what was proved holds.
    return replace(schedule, actions=tuple(tuple(flatten(program)) for program in schedule.actions))


def check_cut(layer_to_stage: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Refuse a cut that leaves out a layer or a stage, or goes back."""
    ascending = list(layer_to_stage) == sorted(layer_to_stage)
    if len(layer_to_stage) != num_layers or not ascending or set(layer_to_stage) != set(range(num_stages)):
        raise UsageError(
            f"layer_to_stage is {list(layer_to_stage)}; needed: for {num_layers} layers, stages 0…{num_stages - 1} in "
            "ascending order, none left out"
        )


def prepare_recompute(layers: Sequence[nn.Module], mode: RecomputeMode, every: int) -> None:
    """Have the layers recompute what they can themselves, or refuse a mode they have no use for."""
    if mode not in get_args(RecomputeMode):
        raise UsageError(
            f"recompute = {mode!r} is unknown{nearest_names(str(mode), get_args(RecomputeMode))}; "
            f"choose one of {', '.join(get_args(RecomputeMode))}"
        )
    if every < 1:
        raise UsageError(f"recompute_layers = {every}; needed: at least 1 layer")
    if mode == "selective" and not recompute_cores(layers):
        raise UsageError(
            "recompute = 'selective', but no layer has a core that can be recomputed (a RecomputesCore, such as "
            "attention); take 'full', or 'none'"
        )


def channels_of(placement: Placement) -> set[Channel]:
    """Return every edge between ranks that a route crosses, both ways."""
    edges = {(a, b, number) for number, route in enumerate(placement.routes) for a, b in pairwise(route) if a != b}
    return edges | {(b, a, number) for a, b, number in edges}
