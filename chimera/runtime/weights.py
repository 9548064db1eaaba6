"""The weights of one rank: its layers materialised, replicas made equal, tied parameters known by name.

Where computation is in a narrower type than gradients are summed in, the weights stay here in the wider one for the
optimizer to update. Gradients are the reduction's business.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from chimera.ir.schedule import Placement
from chimera.runtime.groups import Groups
from chimera.runtime.materialize import broadcast, materialize
from chimera.tensor.gradient_buffer import gradient_dtype
from chimera.tensor.sharding import sharding_of

__all__ = ["TiedGroup", "Weights", "tied_groups"]


class TiedGroup:
    """A parameter that layers of several stages share.

    Attributes:
        name: its first name in ``nn.Sequential(*layers)``.
        stages: the stages that hold it.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.stages: tuple[int, ...] = ()


def tied_groups(layers: Sequence[nn.Module], layer_to_stage: Sequence[int]) -> list[TiedGroup]:
    """Return the parameters that layers of several stages share, in the order of their first names."""
    found: dict[int, TiedGroup] = {}
    for number, (layer, stage) in enumerate(zip(layers, layer_to_stage, strict=True)):
        for name, parameter in layer.named_parameters(prefix=str(number)):
            group = found.setdefault(id(parameter), TiedGroup(name, parameter))
            group.stages = tuple(dict.fromkeys((*group.stages, stage)))
    return [group for group in found.values() if len(group.stages) > 1]


class Weights:
    """This rank's layers and parameters.

    Args:
        layers: the whole model; layers of other ranks stay as they are.
        layer_to_stage: the stage of each layer.
        tied: the tied groups of the whole model.
        placement: where the stages live.
        groups: this rank's place; tells which stages are held here.
        seed: of the initial weights of layers on the meta device.
        dtype: type to compute in; None keeps the layers' own.

    Attributes:
        layers: this rank's layers by global number.
        tied: this rank's tied parameters by the number of their group.
        originals: the weights in the type gradients are summed in, by the identity of the narrower parameter; what is
            sharded is taken out of it.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        layer_to_stage: Sequence[int],
        tied: Sequence[TiedGroup],
        placement: Placement,
        groups: Groups,
        *,
        seed: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.layers = {n: layers[n] for n, stage in enumerate(layer_to_stage) if stage in groups.stages}
        self._stage_of = layer_to_stage
        number_of = {id(group.parameter): number for number, group in enumerate(tied)}
        places = [
            (number_of[id(parameter)], module, name)
            for layer in self.layers.values()
            for module in layer.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in number_of
        ]
        materialize(self.layers, seed, groups.device)
        # Materialising replaced the meta parameters; the shared ones are found again where they stood.
        self.tied: dict[int, nn.Parameter] = {number: getattr(module, name) for number, module, name in places}
        self._tied_names = {id(parameter): tied[number].name for number, parameter in self.tied.items()}
        self._make_replicas_equal(tied, placement, groups)
        self.originals: dict[int, nn.Parameter] = {}
        self._convert(dtype)

    def _make_replicas_equal(self, tied: Sequence[TiedGroup], placement: Placement, groups: Groups) -> None:
        """Take everything from the first rank that holds the stage; a tied parameter, its first stage.

        Tensor-parallel ranks then take from the first of them what each of them has as a whole.
        """

        def first_holder(stage: int) -> int:
            return groups.first_replica(placement.ranks_of(stage)[0])

        for stage, communicator in groups.stages.items():
            buffers = [buffer for layer in self.layers_of(stage) for buffer in layer.buffers()]
            broadcast([*self.untied(stage), *buffers], communicator, groups, root=first_holder(stage))
        for number, communicator in groups.tied.items():
            root = first_holder(tied[number].stages[0])
            if sharding_of(self.tied[number]).partial:
                root = groups.grid.tensor_group(root)[0]
            broadcast([self.tied[number]], communicator, groups, root=root)
        copied = [parameter for _, parameter in self.named_parameters() if not sharding_of(parameter).is_cut]
        broadcast(copied, groups.tensor.communicator, groups, root=groups.grid.tensor_group(groups.rank)[0])

    def _convert(self, dtype: torch.dtype | None) -> None:
        """Give weights their type; where gradients are summed in a wider one, keep the originals in that."""
        for _, parameter in self.named_parameters():
            if not parameter.is_floating_point():
                continue
            original = parameter.detach()
            parameter.data = original.to(dtype or parameter.dtype)
            if gradient_dtype(parameter) != parameter.dtype:
                main = original.to(gradient_dtype(parameter), copy=True)
                self.originals[id(parameter)] = nn.Parameter(main, requires_grad=parameter.requires_grad)
        for layer in self.layers.values():
            for buffer in layer.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype or buffer.dtype)

    def layers_of(self, stage: int) -> list[nn.Module]:
        """Return the layers of one stage, in order."""
        return [layer for number, layer in self.layers.items() if self._stage_of[number] == stage]

    def untied(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of one stage that no other stage shares, each once."""
        return list(
            {
                id(p): p for layer in self.layers_of(stage) for p in layer.parameters() if id(p) not in self._tied_names
            }.values()
        )

    def named_parameters(self, stage: int | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, or a stage's, each once, named as ``nn.Sequential(*layers)`` names them."""
        seen: set[int] = set()
        for number, layer in self.layers.items():
            if stage is not None and self._stage_of[number] != stage:
                continue
            for name, parameter in layer.named_parameters(prefix=str(number)):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._tied_names.get(id(parameter), name), parameter

    def optimizer_parameters(self, stage: int | None = None) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters, or their full-precision originals, each with the gradient attached."""
        pairs = []
        for name, parameter in self.named_parameters(stage):
            main = self.originals.get(id(parameter), parameter)
            main.grad = parameter.grad
            pairs.append((name, main))
        return pairs

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Have all modules in evaluation mode inside the block, whatever they were in."""
        modes = [(module, module.training) for layer in self.layers.values() for module in layer.modules()]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @torch.no_grad()
    def publish(self, stage: int | None = None) -> None:
        """Copy updated full-precision weights into the ones that compute."""
        if self.originals:
            for _, parameter in self.named_parameters(stage):
                if id(parameter) in self.originals:
                    parameter.copy_(self.originals[id(parameter)])
