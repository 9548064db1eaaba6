"""What this rank's optimizer updates, how its norms become the whole model's, and how updates reach all replicas.

It joins parameters, their full-precision originals and, under sharding, the parts this rank is in charge of. It knows
no optimizer.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import _foreach_norm, nn

from chimera.runtime.buckets import Gradients
from chimera.runtime.groups import Groups
from chimera.runtime.holdings import Holding, counts_once
from chimera.runtime.reduction import Reduction
from chimera.runtime.sharded_weights import ShardedWeights
from chimera.runtime.weights import Weights
from chimera.tensor.communicator import Pending
from chimera.tensor.portion import Portion
from chimera.tensor.sharding import sharding_of

__all__ = ["Portions"]


class Portions:
    """The portions of one rank.

    Args:
        weights: this rank's parameters; full-precision originals that are sharded leave it.
        held: the same, by who holds them.
        reduction: their gradients.
        groups: for sums over all ranks.
    """

    def __init__(self, weights: Weights, held: Sequence[Holding], reduction: Reduction, groups: Groups) -> None:
        self._weights = weights
        self._groups = groups
        self._reduction = reduction
        self._of: dict[int, Gradients] = {id(p): g for g in reduction.gradients for p in g.parameters}
        self._shards: list[tuple[Gradients, ShardedWeights]] = [
            (gradients, ShardedWeights(gradients, gradients.replicas, weights.originals))
            for gradients in reduction.gradients
            if gradients.sharded and gradients.replicas is not None
        ]
        # Of each portion that is a stretch: which shards it belongs to, and its parameter's number there.
        self._place: dict[int, tuple[int, int]] = {
            id(shards.portions[id(parameter)][0]): (index, number)
            for index, (_, shards) in enumerate(self._shards)
            for number, parameter in enumerate(shards.parameters)
            if id(parameter) in shards.portions
        }
        self._portions = tuple(self._made())
        self._originals = [
            (weights.originals[id(parameter)], parameter)
            for _, parameter in weights.named_parameters()
            if id(parameter) in weights.originals
        ]
        self._cut = {id(portion.parameter) for portion in self._portions if portion.sharding.is_cut}
        self._saved_here = {
            id(parameter)
            for holding in held
            for number, parameter in enumerate(holding.parameters)
            if holding.group is None or holding.group.ranks[number % len(holding.group.ranks)] == groups.rank
        }

    def portions(self) -> list[Portion]:
        """Return what this rank updates, in the order of the model, gradients attached."""
        self.attach()
        return list(self._portions)

    def attach(self) -> None:
        """Point the ``grad`` of parameters and portions at the buffers, whatever an optimizer made of it."""
        self._reduction.attach()
        for _, shards in self._shards:
            shards.attach()
        for original, parameter in self._originals:
            original.grad = parameter.grad

    def _made(self) -> Iterator[Portion]:
        stretches = {key: cut for _, shards in self._shards for key, cut in shards.portions.items()}
        for name, parameter in self._weights.named_parameters():
            gradients = self._of.get(id(parameter))
            if gradients is None or not gradients.sharded:
                original = self._weights.originals.get(id(parameter), parameter)
                counted = gradients is not None and gradients.counted and self._counts(parameter, shared_out=False)
                yield Portion.whole(name, original, sharding_of(parameter), counted=counted)
            elif id(parameter) in stretches:
                stretch, start = stretches[id(parameter)]
                sharding = sharding_of(parameter)
                shape = torch.Size(sharding.whole_shape(parameter.shape))
                counted = self._counts(parameter, shared_out=True)
                yield Portion(name, stretch, shape, start, counted, sharding)

    def _counts(self, parameter: nn.Parameter, *, shared_out: bool) -> bool:
        return counts_once(parameter, self._groups, shared_out=shared_out)

    # Sums over the whole model

    def gradient_norm(self) -> float:
        """Return the 2-norm of the whole model's gradient, each parameter counted once; a collective."""
        gradients = [portion.parameter.grad for portion in self.portions() if portion.counted]
        squares = _squared_sum([gradient for gradient in gradients if gradient is not None])
        return math.sqrt(float(self._groups.sum_everywhere(torch.tensor([squares], dtype=torch.float64))))

    def sum_over_portions(self, parameters: Sequence[nn.Parameter], values: torch.Tensor) -> torch.Tensor:
        """Add up what the ranks say of their portions of the same parameter; a collective.

        Args:
            parameters: portions of this rank; each rank calls this as often, also with none.
            values: ``[quantities, parameters]``, in fp64; equally many quantities on every rank.

        Returns:
            The same shape: for each portion the sums over all portions of its parameter.
        """
        values = values.to(self._groups.device)
        total = values.clone()
        columns = {id(parameter): column for column, parameter in enumerate(parameters)}
        for index, (gradients, shards) in enumerate(self._shards):
            here = [
                (number, columns[identity])
                for identity, (of, number) in self._place.items()
                if of == index and identity in columns
            ]
            sums = values.new_zeros(values.shape[0], len(shards.parameters))
            numbers, chosen = [number for number, _ in here], [column for _, column in here]
            sums[:, numbers] = values[:, chosen]
            assert gradients.replicas is not None, "what is sharded has replicas"
            wire = gradients.replicas.wire(sums)
            gradients.replicas.communicator.all_reduce(wire).wait()
            total[:, chosen] = wire.to(total.device)[:, numbers]
        return self._sum_over_cuts(parameters, total)

    def _sum_over_cuts(self, parameters: Sequence[nn.Parameter], values: torch.Tensor) -> torch.Tensor:
        """Add up what tensor-parallel ranks say of their parts of a parameter; all have the same portions."""
        tensor = self._groups.tensor
        cut = [column for column, parameter in enumerate(parameters) if id(parameter) in self._cut]
        if tensor.size > 1 and cut:
            values[:, cut] = tensor.start_sum(values[:, cut]).wait()
        return values

    # Weights of all replicas

    def publish(self) -> list[Pending]:
        """Copy updated weights to where they compute; return the gathers that this started under sharding."""
        self._weights.publish()
        return [pending for _, shards in self._shards for pending in shards.publish()]

    def gathers(self, stage: int) -> bool:
        """Whether weights of a stage are still to be waited for."""
        return any(shards.under_way for gradients, shards in self._shards if stage in gradients.stages)

    def wait(self, stage: int | None = None) -> None:
        """Wait until the gathered weights of a stage, or of all, are there."""
        for gradients, shards in self._shards:
            if stage is None or stage in gradients.stages:
                shards.wait()

    # Checkpoints

    def collected(self, of_portion: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Bring a tensor per portion together on the rank that saves its parameter; a collective.

        The parameters of a stage take turns over its replicas, and then over tensor-parallel ranks, so that all of
        them write.

        Args:
            of_portion: the tensor of a portion, in its shape, or None where it has none; the ranks of a parameter
                answer alike.

        Returns:
            By name, what this rank saves, in the shape of the whole parameters: every parameter on one rank.
        """
        names = {id(parameter): name for name, parameter in self._weights.named_parameters()}
        here = {names[identity] for identity in self._saved_here}
        saved = {}
        for portion in self.portions():
            whole = id(portion.parameter) not in self._place
            if whole and portion.name in here and (tensor := of_portion(portion.parameter)) is not None:
                saved[portion.name] = tensor.detach()
        for _, shards in self._shards:
            parts = {
                key: tensor for key, (part, _) in shards.portions.items() if (tensor := of_portion(part)) is not None
            }
            for parameter, tensor in shards.together(parts):
                if id(parameter) in self._saved_here:
                    saved[names[id(parameter)]] = tensor.to("cpu", copy=True)
        return self._joined(saved)

    def _joined(self, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Join the parts that tensor-parallel ranks hold of the same tensors, and keep this rank's share of those."""
        tensor = self._groups.tensor
        if tensor.size == 1:
            return saved
        shardings = {name: sharding_of(parameter) for name, parameter in self._weights.named_parameters()}
        kept = {}
        # Ranks that sum over all tensor-parallel ones have already taken turns.
        turns = (name for name in sorted(saved) if not shardings[name].partial)
        turn_of = {name: number % tensor.size for number, name in enumerate(turns)}
        for name in sorted(saved):
            sharding, whole = shardings[name], saved[name]
            if sharding.is_cut:
                parts = tensor.start_gather(whole.to(self._groups.device).unsqueeze(0), 0).wait()
                whole = sharding.join(parts.cpu().unbind())
            if turn_of.get(name, tensor.rank) == tensor.rank:
                kept[name] = whole
        return kept


def _squared_sum(tensors: list[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements, in fp64."""
    if not tensors:
        return 0.0
    return float(torch.stack(_foreach_norm(tensors, 2, dtype=torch.float64)).square().sum())
