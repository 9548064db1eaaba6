"""What the search asks of the planner's arithmetic: prices of many choices at once, and the estimate of one layout.

``Prices`` are arrays over choices that differ in whatever a price depends on. They have to be what ``estimate`` charges
or less, so that a bound made of them never rejects a layout that would have won.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chimera.plan.estimate import Estimate
from chimera.plan.layout import Layout

__all__ = ["Choices", "Floats", "Prices", "Pricing"]

Floats = NDArray[np.floating[Any]]
"""An array of numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Choices as arrays that broadcast against each other.

    Attributes:
        tensor: t.
        pipeline: p.
        data: d.
        microbatch: b.
        routes: replicas of every stage within one pipeline group.
        recompute: index in ``RECOMPUTES``.
        sequence_parallel: whether.
        sharded: whether.
    """

    tensor: NDArray[np.int64]
    pipeline: NDArray[np.int64]
    data: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    routes: NDArray[np.int64]
    recompute: NDArray[np.int64]
    sequence_parallel: NDArray[np.bool_]
    sharded: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Least prices of choices; times in seconds for one micro-batch.

    Attributes:
        block_s: [kind F I W, choice], of one block; what is run again counts to I.
        embedding_s: [kind, choice], what the first stage has besides blocks.
        head_s: [kind, choice], what the last stage has besides blocks.
        hop_s: [choice], of one message between neighbouring pipeline ranks.
        tail_s: [choice], of what follows the last backward.
        block_reduce_s: [choice], of the reduction of one block's gradients where reductions are part of the schedule:
            the stage whose gradient is last is reduced after it, whatever overlaps.
        block_bytes: [choice], activations of one block.
        head_bytes: [choice], activations of what the last stage has besides blocks.
        block_state_bytes: [choice], weights, gradients and optimizer states of one block.
        embedding_state_bytes: [choice], of the embeddings.
        head_state_bytes: [choice], of the head.
        usable_bytes: [choice], memory of a device that these may take.
    """

    block_s: Floats
    embedding_s: Floats
    head_s: Floats
    hop_s: Floats
    tail_s: Floats
    block_reduce_s: Floats
    block_bytes: Floats
    head_bytes: Floats
    block_state_bytes: Floats
    embedding_state_bytes: Floats
    head_state_bytes: Floats
    usable_bytes: Floats

    def at(self, *index: Any) -> "Prices":
        """Return the prices of some choices, indexed by the last axes."""
        return Prices(*(getattr(self, name)[(..., *index)] for name in Prices.__slots__))


class Pricing(Protocol):
    """A model on a cluster."""

    def prices(self, choices: Choices) -> Prices:
        """Return least prices of many choices."""
        ...

    def estimate(self, layout: Layout) -> Estimate:
        """Return what one layout is expected to cost."""
        ...
