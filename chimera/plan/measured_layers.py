"""Times of layers from measured runs: what blocks and ends took where nothing hid them, in place of modelled times.

Runs without a pipeline do one micro-batch after another, so that their time less the update and the reduction is made
of blocks, embedding and head alone. From all such runs of one width, t and b follow two ratios of measured to modelled
times: of the block, and of the two ends together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from chimera.plan.closed import ModelTimes
from chimera.plan.estimate import Estimate
from chimera.plan.layers import LayerTimes
from chimera.plan.tables import MeasuredRow

__all__ = ["Ratios", "measured_ratios"]

_PULL: Final = 1e-3
"""Weight of the modelled times, which decide where runs of one depth alone cannot tell blocks from ends."""


class Ratios(NamedTuple):
    """Measured over modelled times of layers."""

    blocks: float
    ends: float

    def on(self, modelled: ModelTimes) -> ModelTimes:
        """Return the measured times."""
        return ModelTimes(
            tuple(_times(self.blocks, block) for block in modelled.blocks),
            _times(self.ends, modelled.embedding),
            _times(self.ends, modelled.head),
        )


def measured_ratios(
    rows: Sequence[MeasuredRow], estimates: Sequence[Estimate], modelled: Sequence[ModelTimes]
) -> Mapping[int, Ratios]:
    """Return the ratios of every row whose width, t and b some row without a pipeline has, by the row's index.

    Args:
        rows: measured, of one code base.
        estimates: of each row, with modelled times; they say what update and reduction take.
        modelled: times of each row's layers for one micro-batch.
    """
    alike = defaultdict(list)
    for index, row in enumerate(rows):
        alike[row.shape.hidden, row.shape.seq, row.layout.tensor, row.layout.microbatch].append(index)
    found: dict[int, Ratios] = {}
    for indices in alike.values():
        terms, pull = [], [(_PULL, 0.0), (0.0, _PULL)]
        for index in indices:
            row, made, times = rows[index], estimates[index], modelled[index]
            if row.layout.pipeline == 1:
                layers = row.seconds - (made.step_s - made.pipeline_s)
                blocks = row.shape.layers * float(times.blocks[0].total_s)
                ends = float(times.embedding.total_s + times.head.total_s)
                terms.append((row.layout.microbatches * blocks / layers, row.layout.microbatches * ends / layers))
        if terms:
            sides = np.array([1.0] * len(terms) + [_PULL] * len(pull))
            blocks, ends = np.linalg.lstsq(np.array(terms + pull), sides, rcond=None)[0].tolist()
            found |= dict.fromkeys(indices, Ratios(blocks, ends))
    return found


def _times(ratio: float, layer: LayerTimes) -> LayerTimes:
    return LayerTimes(*(ratio * float(time) for time in layer))
