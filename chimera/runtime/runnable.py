"""What a pipeline checks and works out before it runs: the proved and lowered schedule, cut, channels, recompute."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import get_args

from torch import nn

from chimera.errors import UsageError, nearest_names
from chimera.ir.action import Overlap
from chimera.ir.schedule import Placement, Schedule
from chimera.passes.derived import pairs_apart
from chimera.passes.lower import lower
from chimera.passes.reductions import ReductionMode
from chimera.runtime.groups import Channel
from chimera.runtime.weights import TiedGroup
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.recompute import RecomputeMode, recompute_cores
from chimera.tensor.sharding import sharding_of

__all__ = ["channels_of", "check_cut", "check_shares", "check_updates", "prepare_recompute", "runnable"]


def runnable(schedule: Schedule, reduce: ReductionMode, *, together: Callable[[Overlap], bool]) -> Schedule:
    """Return the schedule as it runs: proved, with messages and reductions.

    Pairs stay those that are run ``together``, by a form of their own; others become a forward, then a backward. So do
    all of an asynchronous schedule: the two may need different versions of the weights, and a layer holds only one.
    """
    keep = together if not schedule.is_asynchronous else lambda _: False
    return lower(pairs_apart(schedule, keep=keep), reduce=reduce)


def check_cut(layer_to_stage: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Refuse a cut that leaves out a layer or a stage, or goes back."""
    ascending = list(layer_to_stage) == sorted(layer_to_stage)
    if len(layer_to_stage) != num_layers or not ascending or set(layer_to_stage) != set(range(num_stages)):
        raise UsageError(
            f"layer_to_stage is {list(layer_to_stage)}; needed: for {num_layers} layers, stages 0…{num_stages - 1} in "
            "ascending order, none left out"
        )


def check_shares(layers: Sequence[nn.Module], tensor: TensorParallel) -> None:
    """Refuse layers that were built for other tensor-parallel ranks than these."""
    built_for = {sharding_of(parameter).size for layer in layers for parameter in layer.parameters()} or {1}
    if max(built_for) != tensor.size:
        raise UsageError(
            f"layers are built for t = {max(built_for)} tensor-parallel ranks, but tensor= has {tensor.size}; pass the "
            "same TensorParallel to both"
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


def check_updates(schedule: Schedule, tied: Sequence[TiedGroup], *, has_hook: bool, sharded: bool) -> None:
    """Refuse a schedule and an update hook that do not go together, and weights that no single STEP could update."""
    if schedule.is_asynchronous and not has_hook:
        raise UsageError(
            f"schedule {schedule.name!r} is asynchronous: it updates its stages by STEP, which needs update=, a "
            "function that is called with each runtime.updates.Update; give one, or take a synchronous schedule"
        )
    if has_hook and not schedule.is_asynchronous:
        raise UsageError(
            f"update= is given, but schedule {schedule.name!r} has no STEP that would call it; leave update= out and "
            "step the optimizer after pipe.step, or take an asynchronous schedule"
        )
    if schedule.is_asynchronous and sharded:
        raise UsageError(
            f"schedule {schedule.name!r} updates the weights while micro-batches still compute with older ones, which "
            "a shard does not keep; leave shard_optimizer out, or take a synchronous schedule"
        )
    if schedule.is_asynchronous and tied:
        stages = " and ".join(map(str, tied[0].stages))
        raise UsageError(
            f"schedule {schedule.name!r} updates each stage on its own, but the weight {tied[0].name} is shared by "
            f"stages {stages}; untie it, put the layers that hold it into one stage by layer_to_stage=, or take a "
            "synchronous schedule"
        )


def channels_of(placement: Placement) -> set[Channel]:
    """Return every edge between ranks that a route crosses, both ways."""
    edges = {(a, b, number) for number, route in enumerate(placement.routes) for a, b in pairwise(route) if a != b}
    return edges | {(b, a, number) for a, b, number in edges}
