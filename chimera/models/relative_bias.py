"""Relative position biases: what T5 adds to attention scores for the distance of a key from its query.

Distances fall into classes, exact for short ones and logarithmic for long ones (Raffel et al. 2020, section 2.1). The
table is shared by the blocks of a stack and cut over tensor-parallel ranks by head. Knows no attention.
"""

import math

import torch
from torch import Tensor, nn

from chimera.models.attention import later_positions
from chimera.models.transformer import tie
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.sharding import Sharding, even_segments, mark

__all__ = ["RelativeBias"]


class RelativeBias(nn.Embedding):
    """What is added to attention scores for the distance of key and query, one number per class and head.

    Args:
        num_heads: Of all ranks together.
        parallel: The ranks that share the heads.
        num_classes: Of distances, a multiple of 4.
        max_distance: From which on all distances are in the last class.
        causal: Whether keys behind the query are hidden; all classes are then for those before it.
        owner: The table whose weight is this one's too; None draws one.
    """

    def __init__(
        self,
        num_heads: int,
        parallel: TensorParallel,
        *,
        num_classes: int,
        max_distance: int,
        causal: bool,
        owner: "RelativeBias | None" = None,
    ) -> None:
        super().__init__(num_classes, num_heads // parallel.size)
        self.max_distance = max_distance
        self.causal = causal
        mark(self.weight, Sharding.cut(1, even_segments([num_heads], parallel), parallel))
        if owner is not None:
            tie(self, owner)

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        """Return ``[1, heads, length, length]``, −∞ where a key is hidden."""
        positions = torch.arange(length, device=self.weight.device)
        biases = super().forward(self._classes(positions[None, :] - positions[:, None])).permute(2, 0, 1)[None]
        if self.causal:
            return biases.masked_fill(later_positions(length, biases.device), -math.inf)
        return biases

    def _classes(self, distances: Tensor) -> Tensor:
        """Return the class of each distance from query to key: exact for short ones, logarithmic for long ones."""
        count = self.num_embeddings
        if self.causal:
            first, distances = torch.zeros_like(distances), (-distances).clamp_min(0)
        else:
            count //= 2
            first, distances = (distances > 0) * count, distances.abs()
        exact = count // 2
        # In the order of operations of T5's authors, on which the class of a distance at a boundary depends.
        share = torch.log(distances.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        distant = (exact + (share * (count - exact)).long()).clamp_max(count - 1)
        return first + torch.where(distances < exact, distances, distant)
