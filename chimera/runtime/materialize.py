"""Give this rank's layers their weights: allocate what is on the meta device, draw it by layer, make replicas equal."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from chimera.errors import UsageError
from chimera.runtime.groups import Groups
from chimera.tensor.communicator import Communicator
from chimera.tensor.randomness import Purpose, mix, preserved_generators, seed_generators
from chimera.tensor.sharding import copy_sharding

__all__ = ["broadcast", "materialize"]


def materialize(layers: Mapping[int, nn.Module], seed: int, device: torch.device) -> None:
    """Allocate and initialise the parameters of ``layers`` (by global number) that are on the meta device.

    Every layer draws from its own key, so weights do not depend on the layout. The last layer comes first: a parameter
    that two layers share ends as its first owner drew it. Layers that have their weights already only move.

    Raises:
        UsageError: a layer on the meta device without ``reset_parameters()``.
    """
    made: dict[int, nn.Parameter] = {}
    for number in sorted(layers, reverse=True):
        layer = layers[number]
        tensors = [*layer.parameters(), *layer.buffers()]
        on_meta = [tensor.is_meta or id(tensor) in made for tensor in tensors]
        if not any(on_meta):
            layer.to(device)
            continue
        reset = getattr(layer, "reset_parameters", None)
        if reset is None or not all(on_meta):
            raise UsageError(
                f"layer {number} ({type(layer).__name__}) has weights on the meta device, but "
                f"{'no reset_parameters() to initialise them' if reset is None else 'others that are not'}; "
                "give it one that draws all its parameters, or build it on a real device"
            )
        _allocate(layer, made, device)
        with preserved_generators(device), torch.no_grad():
            seed_generators(mix(Purpose.INITIAL_WEIGHTS, seed, number), device)
            reset()


def _allocate(layer: nn.Module, made: dict[int, nn.Parameter], device: torch.device) -> None:
    """Replace meta tensors by real ones, one for all places that share it."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and id(parameter) not in made:
                real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
                copy_sharding(parameter, real)
                made[id(parameter)] = made[id(real)] = real
            if parameter.is_meta:
                setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))


def broadcast(tensors: Iterable[torch.Tensor], group: Communicator | None, groups: Groups, *, root: int) -> None:
    """Copy the tensors of world rank ``root`` to the other ranks of its group."""
    if group is None:
        return
    for tensor in tensors:
        wire = tensor.detach().cpu() if groups.staged_on_cpu else tensor.detach().contiguous()
        group.broadcast(wire, root).wait()
        if wire.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(wire)
