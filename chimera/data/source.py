"""Samples as micro-batches of tensors.

Knows which samples make up a micro-batch: a pure function of (step, index), so there is no loader state to save, to
lose or to bring to another number of ranks. Refuses to know which rank asks, on which device, and for what.
"""

from dataclasses import dataclass

import numpy as np
import torch

from chimera.data.bert_samples import BertSamples
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
    """

    samples: BertSamples
    microbatch_size: int
    microbatches_per_step: int

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes below 1."""
        for name in ("microbatch_size", "microbatches_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.microbatch_size * self.microbatches_per_step

    def microbatch(self, step: int, index: int) -> Microbatch:
        """Return the samples step·global_batch + index·b + i for i in range(b).

        Returns:
            The tensors of ``BertSamples``, int64 and stacked along dim 0: (b, sequence_length), ``nsp_labels`` (b,).
        """
        if step < 0 or not 0 <= index < self.microbatches_per_step:
            raise IndexError(f"micro-batch {index} of step {step}: a step has {self.microbatches_per_step}")
        first = step * self.global_batch + index * self.microbatch_size
        samples = [self.samples[first + offset] for offset in range(self.microbatch_size)]
        return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


def evaluation_microbatches(
    samples: BertSamples, *, microbatch_size: int, num_microbatches: int
) -> tuple[Microbatch, ...]:
    """Return the first samples as a fixed set of equal micro-batches: the same whenever and wherever it is made."""
    source = MicrobatchSource(samples, microbatch_size, num_microbatches)
    return tuple(source.microbatch(0, index) for index in range(num_microbatches))
