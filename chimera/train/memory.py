"""What each rank of a run keeps of its parameters, before any rank starts: a function of the configuration alone.

Activations are the schedule's matter. Layers are built without storage, so the largest model is counted in no time.
"""

from collections.abc import Sequence

from torch import nn

from chimera.plan.buffers import StateBytes, state_bytes
from chimera.runtime.weights import tied_groups
from chimera.tensor.gradient_buffer import of_one_type
from chimera.tensor.sharding import sharding_of
from chimera.train.config import TrainConfig
from chimera.train.layout import Layout
from chimera.train.precision import torch_dtype

__all__ = ["bytes_per_rank"]


def bytes_per_rank(config: TrainConfig, layout: Layout, layers: Sequence[nn.Module]) -> tuple[StateBytes, ...]:
    """Return what each pipeline rank keeps: parameters, gradients, full-precision copies and moments.

    Args:
        config: of the run.
        layout: what the configuration makes of schedule and model.
        layers: of the whole model, as one of the tensor-parallel ranks shares them; on any device.
    """
    placement = layout.schedule.placement
    tied = tied_groups(layers, layout.layer_to_stage)
    shared = {id(group.parameter) for group in tied}
    total = [StateBytes()] * placement.num_ranks
    for stage in range(placement.num_stages):
        of_stage = [layer for layer, at in zip(layers, layout.layer_to_stage, strict=True) if at == stage]
        own = {id(p): p for layer in of_stage for p in layer.parameters() if id(p) not in shared}
        ranks = placement.ranks_of(stage)
        for rank in ranks:
            total[rank] += _bytes_of(config, list(own.values()), len(ranks))
    for group in tied:
        ranks = tuple(dict.fromkeys(rank for stage in group.stages for rank in placement.ranks_of(stage)))
        for rank in ranks:
            total[rank] += _bytes_of(config, [group.parameter], len(ranks))
    return tuple(total)


def _bytes_of(config: TrainConfig, parameters: Sequence[nn.Parameter], copies: int) -> StateBytes:
    """Return what one replica keeps of parameters that ``copies`` ranks of each pipeline hold."""
    dtype = torch_dtype(config.train.dtype)
    kept = StateBytes()
    for partial in (False, True):
        together = [parameter for parameter in parameters if sharding_of(parameter).partial is partial]
        for alike in of_one_type(together):
            kept += state_bytes(
                [parameter.numel() for parameter in alike],
                replicas=copies * config.parallel.data * (config.parallel.tensor if partial else 1),
                sharded=config.parallel.shard_optimizer,
                width=(dtype or alike[0].dtype).itemsize,
                moments=len(config.optimizer.moments),
                bucket_bytes=config.bucket_bytes,
            )
    return kept
