"""What a code base does that a device does not decide: padding, number formats, overlap, and how well its kernels do.

Facts about a code base come from its publication or its source; at most two numbers are fitted to its own runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chimera.plan.hardware import DTYPE_BYTES, Cluster, Constant, Dtype
from chimera.plan.kernels import Rates, rates_of
from chimera.plan.parameters import padded_vocab

__all__ = ["SOFTWARE_CONSTANTS", "Software"]

SOFTWARE_CONSTANTS: Final = ("matrix_factor", "hop_factor", "unaligned_penalty")
"""Numbers that a code base may have, two of them at most; 1 for one that it does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One code base.

    Attributes:
        name: its key, as in ``--software``.
        title: its name in print.
        dtype: number format of products and activations.
        vocab_multiple: the vocabulary is padded to a multiple of this times t; None where it is cut without padding.
        fused_attention: whether scores never reach memory.
        gradient_bytes: of one accumulated gradient, in memory.
        reduced_bytes: of one gradient in the reduction over replicas.
        accumulated_bytes: that adding one gradient to those of earlier micro-batches moves in an operation of its own;
            0 where the product that makes the gradient adds it.
        overlaps_reduction: whether gradients are reduced while the pipeline drains, or after it.
        message_bytes_per_s: what messages between stages reach, where they take their bytes over one given rate
            whatever the links are; None where the links decide.
        constants: fitted: ``matrix_factor``, how fast its products are against the device's calibration; at most one
            more of ``hop_factor``, how long a message holds up the pipeline, in messages, and ``unaligned_penalty``.
        sources: where the facts come from.
    """

    name: str
    title: str
    dtype: Dtype
    vocab_multiple: int | None
    fused_attention: bool
    gradient_bytes: float
    reduced_bytes: float
    accumulated_bytes: float
    overlaps_reduction: bool
    message_bytes_per_s: float | None
    constants: Mapping[str, Constant]
    sources: tuple[str, ...]

    def constant(self, name: str) -> float:
        """Return a fitted constant, or 1 for one that this code base does not have."""
        fitted = self.constants.get(name)
        return 1.0 if fitted is None else fitted.value

    def rates(self, cluster: Cluster) -> Rates:
        """Return the ceilings and constants of a cluster for this code base's products and messages."""
        return rates_of(
            cluster,
            self.dtype,
            float(DTYPE_BYTES[self.dtype]),
            message_bytes_per_s=self.message_bytes_per_s or 0.0,
        )

    def vocab(self, vocab: int, tensor: int) -> int:
        """Return the rows of the word embedding that ``tensor`` ranks share."""
        if self.vocab_multiple is None:
            return vocab // tensor * tensor
        return padded_vocab(vocab, tensor, self.vocab_multiple)
