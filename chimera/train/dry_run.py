"""What the ranks of a run would hold, before any is started: stages, layers, parameters and the bytes they keep.

Layers are built without storage, as this run would build them, so parameters are counted rather than estimated. Which
ranks there are says ``plan.ranks``, how the bytes are worked out says ``memory``.
"""

from dataclasses import dataclass

import torch

from chimera.models import bert_layers, count_parameters
from chimera.plan.buffers import StateBytes
from chimera.tensor.parallel import TensorParallel
from chimera.train.config import TrainConfig
from chimera.train.layout import Layout
from chimera.train.memory import bytes_per_rank

__all__ = ["RankHolds", "holds_of_ranks"]


@dataclass(frozen=True, slots=True)
class RankHolds:
    """What every rank at one place of the pipeline holds.

    Attributes:
        stages: by number.
        layers: by number, those of all its stages.
        parameters: elements of its weights, each once; padding of a shared vocabulary is among them.
        bytes: what it keeps for them, activations apart.
    """

    stages: tuple[int, ...]
    layers: tuple[int, ...]
    parameters: int
    bytes: StateBytes


def holds_of_ranks(config: TrainConfig, layout: Layout) -> list[RankHolds]:
    """Return what the ranks at each place of the pipeline hold; ranks that differ elsewhere hold as much."""
    with torch.device("meta"):
        layers = bert_layers(config.model, TensorParallel(0, config.parallel.tensor, config.parallel.sequence))
    found = []
    for place, kept in enumerate(bytes_per_rank(config, layout, layers)):
        stages = layout.schedule.placement.stages_on(place)
        numbers = tuple(number for number, stage in enumerate(layout.layer_to_stage) if stage in stages)
        found.append(RankHolds(tuple(stages), numbers, count_parameters([layers[number] for number in numbers]), kept))
    return found
