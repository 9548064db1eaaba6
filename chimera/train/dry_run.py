"""What a run would be: its ranks, what each of them holds, and the bytes it keeps. Starts nothing.

Layers are built on the meta device, as this run would build them, so parameters are counted rather than estimated, and
bytes follow the arithmetic by which the runtime allocates its buffers. Activations are not among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from chimera.models import bert_layers
from chimera.plan.buffers import StateBytes, state_bytes
from chimera.plan.ranks import RankGrid
from chimera.runtime.weights import tied_groups
from chimera.tensor.gradient_buffer import gradient_dtype
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.sharding import sharding_of
from chimera.train.config import TrainConfig
from chimera.train.layout import Layout
from chimera.train.optimizers import OptimizerConfig
from chimera.train.precision import torch_dtype

__all__ = ["RankHolds", "holds_of_ranks"]


@dataclass(frozen=True, slots=True)
class RankHolds:
    """What every rank at one place of the pipeline holds.

    Attributes:
        stages: by number.
        layers: by number, those of all its stages.
        parameters: elements of its weights, padding of the vocabulary included, each once.
        bytes: what it keeps for them.
    """

    stages: tuple[int, ...]
    layers: tuple[int, ...]
    parameters: int
    bytes: StateBytes


def holds_of_ranks(config: TrainConfig, layout: Layout) -> list[RankHolds]:
    """Return what the ranks at each place of the pipeline hold; ranks that differ elsewhere hold as much."""
    parallel = TensorParallel(0, config.parallel.tensor, config.parallel.sequence)
    with torch.device("meta"):
        layers = bert_layers(config.model, parallel)
    cut = layout.layer_to_stage
    tied = tied_groups(layers, cut)
    shared = {id(group.parameter) for group in tied}
    placement = layout.schedule.placement
    found = []
    for place in range(config.grid.pipeline):
        stages = placement.stages_on(place)
        together = [
            (alike, len(placement.ranks_of(stage)))
            for stage in stages
            for alike in _summed_together(_parameters(layers, cut, stage), shared)
        ]
        for group in tied:
            if set(group.stages) & set(stages):
                holders = {rank for stage in group.stages for rank in placement.ranks_of(stage)}
                together.append(([group.parameter], len(holders)))
        kept = [_bytes(config, parameters, holders) for parameters, holders in together]
        found.append(
            RankHolds(
                tuple(stages),
                tuple(number for number, stage in enumerate(cut) if stage in stages),
                sum(parameter.numel() for parameters, _ in together for parameter in parameters),
                sum(kept, StateBytes()),
            )
        )
    return found


def _parameters(layers: Sequence[nn.Module], cut: Sequence[int], stage: int) -> list[nn.Parameter]:
    of_stage = [layer for layer, at in zip(layers, cut, strict=True) if at == stage]
    return list({id(p): p for layer in of_stage for p in layer.parameters()}.values())


def _summed_together(parameters: Sequence[nn.Parameter], shared: set[int]) -> list[list[nn.Parameter]]:
    """Return a stage's own parameters: those that replicas sum, and those that tensor-parallel ranks do too."""
    own = [parameter for parameter in parameters if id(parameter) not in shared]
    kinds = ([p for p in own if sharding_of(p).partial is partial] for partial in (False, True))
    return [kind for kind in kinds if kind]


def _bytes(config: TrainConfig, parameters: Sequence[nn.Parameter], holders: int) -> StateBytes:
    """Return what a rank keeps for parameters that ranks at ``holders`` places of the pipeline hold."""
    dtype = torch_dtype(config.train.dtype) or parameters[0].dtype
    grid: RankGrid = config.grid
    replicas = holders * grid.data * (grid.tensor if sharding_of(parameters[0]).partial else 1)
    assert gradient_dtype(parameters[0]) is torch.float32, "weights are drawn in fp32"
    return state_bytes(
        [parameter.numel() for parameter in parameters],
        replicas=replicas,
        sharded=config.parallel.shard_optimizer,
        width=dtype.itemsize,
        moments=_num_moments(config.optimizer),
        bucket_bytes=config.bucket_bytes,
    )


def _num_moments(optimizer: OptimizerConfig) -> int:
    """Return how many tensors the optimizer keeps for each parameter."""
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 2
