"""Times of layers from measured runs: what blocks and ends took where nothing hid them, in place of modelled times.

Runs without a pipeline do one micro-batch after another, then reduce and update. From all such runs of one width, t and
b follow ratios of measured to modelled times: of the block, of the two ends together, and of the rest of the step.
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
"""Weight of the modelled times, which decide where too few runs cannot tell the parts of a step apart."""


class Ratios(NamedTuple):
    """Measured over modelled times of one profile.

    Attributes:
        blocks: of the blocks.
        ends: of embedding and head together.
        rest: of what follows the last backward, reduction and update, by layers and replicas where no pipeline was.
    """

    blocks: float
    ends: float
    rest: Mapping[tuple[int, int], float]

    def on(self, modelled: ModelTimes) -> ModelTimes:
        """Return the measured times of layers."""
        return ModelTimes(
            tuple(_times(self.blocks, block) for block in modelled.blocks),
            _times(self.ends, modelled.embedding),
            _times(self.ends, modelled.head),
        )

    def step_s(self, row: MeasuredRow, made: Estimate) -> float:
        """Return the time of a run's step, given its estimate with measured times of layers."""
        own = row.layout.pipeline == 1
        rest = self.rest.get((row.shape.layers, row.layout.data), 1.0) if own else 1.0
        return made.pipeline_s + rest * (made.step_s - made.pipeline_s)


def measured_ratios(
    rows: Sequence[MeasuredRow], estimates: Sequence[Estimate], modelled: Sequence[ModelTimes]
) -> Mapping[int, Ratios]:
    """Return the ratios of every row whose width, t and b some row without a pipeline has, by the row's index.

    Args:
        rows: measured, of one code base.
        estimates: of each row, with modelled times.
        modelled: times of each row's layers for one micro-batch.
    """
    alike = defaultdict(list)
    for index, row in enumerate(rows):
        alike[row.shape.hidden, row.shape.seq, row.layout.tensor, row.layout.microbatch].append(index)
    found: dict[int, Ratios] = {}
    for indices in alike.values():
        alone = [index for index in indices if rows[index].layout.pipeline == 1]
        if not alone:
            continue
        kinds = sorted({_kind(rows[index]) for index in alone})
        terms = np.zeros((len(alone), 2 + len(kinds)))
        for place, index in enumerate(alone):
            row, made, times = rows[index], estimates[index], modelled[index]
            share = row.layout.microbatches / row.seconds
            terms[place, 0] = share * row.shape.layers * float(times.blocks[0].total_s)
            terms[place, 1] = share * float(times.embedding.total_s + times.head.total_s)
            terms[place, 2 + kinds.index(_kind(row))] = (made.step_s - made.pipeline_s) / row.seconds
        pull = _PULL * np.eye(terms.shape[1])
        sides = np.concatenate([np.ones(len(alone)), _PULL * np.ones(len(pull))])
        blocks, ends, *rest = np.linalg.lstsq(np.vstack([terms, pull]), sides, rcond=None)[0].tolist()
        found |= dict.fromkeys(indices, Ratios(blocks, ends, dict(zip(kinds, rest, strict=True))))
    return found


def _kind(row: MeasuredRow) -> tuple[int, int]:
    return row.shape.layers, row.layout.data


def _times(ratio: float, layer: LayerTimes) -> LayerTimes:
    return LayerTimes(*(ratio * float(time) for time in layer))
