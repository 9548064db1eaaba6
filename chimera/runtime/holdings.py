"""Which ranks hold which of this rank's parameters: what is summed, updated and saved together.

A stage's parameters are held by its replicas (routes × d) with the same share of each layer. A parameter that several
stages share is held by the replicas of all of them. One of which each tensor-parallel rank computes a summand of the
gradient is held by all of those too. Knows no buffers and no optimizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from chimera.ir.schedule import Placement
from chimera.runtime.groups import Groups
from chimera.runtime.weights import TiedGroup, Weights
from chimera.tensor.communicator import Communicator
from chimera.tensor.sharding import sharding_of

__all__ = ["Holding", "counts_once", "holdings"]


@dataclass(frozen=True, slots=True)
class Holding:
    """Parameters that the same ranks hold, and whose gradients are the sums over these.

    Attributes:
        parameters: of this rank, in the order of the model.
        places: where each stands among the parameters of its stage; 0 for a tied one.
        stages: those here that have them.
        group: their holders; None where this rank is the only one.
        first: whether this rank is the first of those, in groups of their own for each tensor-parallel rank.
        tied: whether it is one parameter that several stages share.
    """

    parameters: tuple[nn.Parameter, ...]
    places: tuple[int, ...]
    stages: frozenset[int]
    group: Communicator | None
    first: bool
    tied: bool


def holdings(weights: Weights, tied: Sequence[TiedGroup], placement: Placement, groups: Groups) -> list[Holding]:
    """Return who holds this rank's parameters, stage by stage and then each tied one.

    Args:
        weights: this rank's parameters.
        tied: the tied groups of the whole model.
        placement: where the stages live; the first holder of each is the one that counts.
        groups: communicators of stages and tied groups.
    """
    found: list[Holding] = []
    for stage, group in groups.stages.items():
        for alike in _alike(weights.untied(stage)):
            holders = groups.copies[stage] if sharding_of(next(iter(alike.values()))).partial else group
            found.append(_holding(alike, [stage], holders, placement.ranks_of(stage)[0], groups, tied=False))
    for number, group in groups.tied.items():
        stages = tied[number].stages
        first = min(rank for stage in stages for rank in placement.ranks_of(stage))
        found.append(_holding({0: weights.tied[number]}, stages, group, first, groups, tied=True))
    return found


def counts_once(parameter: nn.Parameter, groups: Groups, *, shared_out: bool) -> bool:
    """Return whether what this rank has of a parameter is, of all tensor-parallel ranks, counted here in a norm.

    Args:
        parameter: of this rank.
        groups: this rank's place.
        shared_out: whether its holders have a different part of it each.
    """
    sharding = sharding_of(parameter)
    return sharding.is_cut or (sharding.partial and shared_out) or groups.tensor.rank == 0


def _alike(parameters: Sequence[nn.Parameter]) -> Iterator[dict[int, nn.Parameter]]:
    """Yield by place the parameters whose gradients are partial, and the others, which one group sums in one order."""
    for partial in (False, True):
        alike = {
            place: parameter for place, parameter in enumerate(parameters) if sharding_of(parameter).partial is partial
        }
        if alike:
            yield alike


def _holding(
    by_place: Mapping[int, nn.Parameter],
    stages: Sequence[int],
    group: Communicator | None,
    first: int,
    groups: Groups,
    *,
    tied: bool,
) -> Holding:
    is_first = groups.rank == groups.first_replica(first)
    return Holding(
        tuple(by_place.values()),
        tuple(by_place),
        frozenset(stages) & set(groups.stages),
        group,
        first=is_first,
        tied=tied,
    )
