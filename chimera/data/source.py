"""Samples as micro-batches of tensors.

Knows which samples make up a micro-batch: a pure function of (step, index), so there is no loader state to save, to
lose or to bring to another number of ranks. Refuses to know which rank asks, on which device, and for what.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chimera.data.ramp import NO_RAMP, BatchRamp
from chimera.data.samples import Samples
from chimera.errors import ConfigError

__all__ = ["Microbatch", "MicrobatchSource", "evaluation_microbatches"]

Microbatch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchSource:
    """Micro-batches by step and index.

    Attributes:
        samples: where samples come from.
        microbatch_size: samples of a micro-batch, b.
        microbatches_per_step: micro-batches of a step over all routes, accumulation runs and data-parallel replicas;
            times b it is the global batch. Replica r of d that runs m of them per step takes the indices r·m to
            r·m + m − 1.
        ramp: batches that grow over the first steps; ``microbatches_per_step`` is what they grow to.
    """

    samples: Samples
    microbatch_size: int
    microbatches_per_step: int
    ramp: BatchRamp = NO_RAMP

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes below 1, or a ramp that does not fit them."""
        for name in ("microbatch_size", "microbatches_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        self.ramp.check(self.global_batch, self.microbatch_size)

    @property
    def global_batch(self) -> int:
        """Samples of a step, after any ramp."""
        return self.microbatch_size * self.microbatches_per_step

    def microbatches_of(self, step: int) -> int:
        """Return how many micro-batches a step has."""
        return self.ramp.batch(step, self.global_batch) // self.microbatch_size

    def sample_indices(self, step: int, index: int) -> range:
        """Return the samples of a micro-batch: those of the step from index·b on."""
        if step < 0 or not 0 <= index < self.microbatches_of(step):
            raise IndexError(f"micro-batch {index} of step {step}: a step has {self.microbatches_of(step)}")
        first = self.ramp.samples_before(step, self.global_batch) + index * self.microbatch_size
        return range(first, first + self.microbatch_size)

    def microbatch(self, step: int, index: int, fields: Collection[str] | None = None) -> Microbatch:
        """Return a micro-batch.

        Args:
            step: counted from 0.
            index: of the micro-batch in the step.
            fields: those to make; all where not given. Without any, no sample is read.

        Returns:
            The tensors of the samples, int64 and stacked along dim 0, as (b, sequence_length) or (b,).

        Raises:
            IndexError: the step has no such micro-batch.
        """
        indices = self.sample_indices(step, index)
        wanted = self.samples.fields if fields is None else [name for name in self.samples.fields if name in fields]
        if not wanted:
            return {}
        samples: Sequence[dict[str, np.ndarray[Any, Any]]] = [self.samples.sample(i, wanted) for i in indices]
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in wanted}


def evaluation_microbatches(
    samples: Samples, *, microbatch_size: int, num_microbatches: int, fields: Collection[str] | None = None
) -> tuple[Microbatch, ...]:
    """Return the first samples as a fixed set of equal micro-batches: the same whenever and wherever it is made."""
    source = MicrobatchSource(samples, microbatch_size, num_microbatches)
    return tuple(source.microbatch(0, index, fields) for index in range(num_microbatches))
