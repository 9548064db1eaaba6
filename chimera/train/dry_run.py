"""What the ranks of a run would hold, before any is started: stages, layers, parameters and the bytes they keep.

Layers are built without storage, as this run would build them, so parameters are counted rather than estimated. Which
ranks there are says ``plan.ranks``, how the bytes are worked out say ``memory`` and ``activations``.
"""

from dataclasses import dataclass
from typing import Final

import torch

from chimera.models import count_parameters
from chimera.plan.buffers import StateBytes
from chimera.runtime.weights import tied_groups
from chimera.tensor.parallel import TensorParallel
from chimera.train.activations import peak_activation_bytes
from chimera.train.config import TrainConfig
from chimera.train.families import layers_of
from chimera.train.layout import Layout
from chimera.train.memory import bytes_per_rank

__all__ = ["RankHolds", "embedding_stages", "holds_of_ranks"]


_WORD_EMBEDDING: Final = "0.word.weight"
"""Its name in every family."""


@dataclass(frozen=True, slots=True)
class RankHolds:
    """What every rank at one place of the pipeline holds.

    Attributes:
        stages: by number.
        layers: by number, those of all its stages.
        parameters: elements of its weights, each once; padding of a shared vocabulary is among them.
        bytes: what it keeps for them.
        activations: bytes that it keeps for backwards at its schedule's peak.
    """

    stages: tuple[int, ...]
    layers: tuple[int, ...]
    parameters: int
    bytes: StateBytes
    activations: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.bytes.total + self.activations


def holds_of_ranks(config: TrainConfig, layout: Layout) -> list[RankHolds]:
    """Return what the ranks at each place of the pipeline hold; ranks that differ elsewhere hold as much."""
    with torch.device("meta"):
        layers = layers_of(config.model, TensorParallel(0, config.parallel.tensor, config.parallel.sequence))
    found = []
    states, activations = bytes_per_rank(config, layout, layers), peak_activation_bytes(config, layout)
    for place, (kept, held) in enumerate(zip(states, activations, strict=True)):
        stages = layout.schedule.placement.stages_on(place)
        numbers = tuple(number for number, stage in enumerate(layout.layer_to_stage) if stage in stages)
        parameters = count_parameters([layers[number] for number in numbers])
        found.append(RankHolds(tuple(stages), numbers, parameters, kept, held))
    return found


def embedding_stages(config: TrainConfig, layout: Layout) -> tuple[int, ...]:
    """Return the stages that share the word embedding and sum its gradient; none where one stage alone has it."""
    with torch.device("meta"):
        tied = tied_groups(layers_of(config.model), layout.layer_to_stage)
    return next((group.stages for group in tied if group.name == _WORD_EMBEDDING), ())
