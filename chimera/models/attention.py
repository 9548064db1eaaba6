"""Attention of all architectures: of a sequence to itself and to another one, heads shared by tensor-parallel ranks.

The core is torch's fused one, or an explicit softmax where attention weights are dropped: fused kernels do not promise
the mask that a key stands for. Queries may share keys and values in groups. Where positions come from (rotation, a bias
on the scores, nothing) is said by the architecture. Knows no norms and no residuals.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from chimera.models.config import TransformerConfig
from chimera.models.rotary import RotaryEmbedding
from chimera.tensor.dropout import draw_key, dropout
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear
from chimera.tensor.recompute import RecomputesCore, recomputed
from chimera.tensor.sharding import even_segments

__all__ = ["Attention", "CrossAttention", "SelfAttention", "later_positions"]


class Attention(nn.Module, RecomputesCore):
    """Mixes values by the scores of queries and keys (Vaswani et al. 2017, section 3.2.1), on this rank's heads.

    A subclass makes the three; ``output`` brings what comes of them back to the residual stream.

    Args:
        config: Sizes.
        parallel: The ranks that share the heads.
        causal: Whether a position sees only itself and those before it.
        bias: Whether projections have biases.
        scale: Of the scores; None means 1 / √head size.
    """

    def __init__(
        self, config: TransformerConfig, parallel: TensorParallel, *, causal: bool, bias: bool, scale: float | None
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.num_heads = config.num_heads // parallel.size
        self.num_groups = config.key_value_heads // parallel.size
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.causal = causal
        self.scale = 1.0 / math.sqrt(self.head_size) if scale is None else scale
        self.output = RowParallelLinear(config.num_heads * self.head_size, config.hidden_size, parallel, bias=bias)

    def heads_of(self, projected: Tensor) -> Tensor:
        """Cut ``[b, s, heads · head size]`` into ``[b, heads, s, head size]``."""
        return torch.unflatten(projected, -1, (-1, self.head_size)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention's output ``[b, s, h]``, or this rank's part of it, where the sequence is divided.

        Args:
            query: ``[b, heads, s, head size]``.
            key: ``[b, key-value heads, other s, head size]``.
            value: Likewise.
            mask: Added to the scores, broadcastable to ``[b, heads, s, other s]``; None adds nothing. Causal attention
                takes none: padding stands behind the last real token, where no real token looks.
        """
        assert mask is None or not self.causal, "causal attention takes no mask"
        drops = self.training and self.dropout > 0.0
        # The dropout's key is drawn out here, so that a recomputed core drops the same weights again.
        inputs = (query, key, value, mask, draw_key(query.device) if drops else None)
        mixed = recomputed(self._core, *inputs) if self.recompute_core else self._core(*inputs)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _core(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_key: Tensor | None
    ) -> Tensor:
        if self.num_groups < self.num_heads:
            key, value = (part.repeat_interleave(self.num_heads // self.num_groups, dim=1) for part in (key, value))
        if dropout_key is None:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=self.causal, scale=self.scale
            )
        scores = (query * self.scale) @ key.transpose(-1, -2)
        if self.causal:
            scores.masked_fill_(later_positions(scores.shape[-1], scores.device), -math.inf)
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        part = self.parallel.part_along(1)
        return dropout(weights, self.dropout, training=True, part=part, key=dropout_key) @ value


class SelfAttention(Attention):
    """Attention of a sequence to itself, the projections of queries, keys and values fused.

    Rows of ``qkv`` are all queries, then all keys, then all values, each ordered by head.

    Args:
        config: Sizes.
        parallel: The ranks that share the heads.
        causal, bias, scale: See ``Attention``.
        rotary: What turns queries and keys; None for nothing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parallel: TensorParallel,
        *,
        causal: bool,
        bias: bool = True,
        scale: float | None = None,
        rotary: RotaryEmbedding | None = None,
    ) -> None:
        super().__init__(config, parallel, causal=causal, bias=bias, scale=scale)
        self.rotary = rotary
        heads = (config.num_heads, config.key_value_heads, config.key_value_heads)
        segments = even_segments([count * self.head_size for count in heads], parallel)
        self.qkv = ColumnParallelLinear(config.hidden_size, segments, parallel, bias=bias)

    @torch.no_grad()
    def scale_queries(self, factor: float) -> None:
        """Multiply the rows of weight that make the queries."""
        self.qkv.weight[: self.num_heads * self.head_size].mul_(factor)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the positions of each sequence.

        Args:
            hidden: ``[b, s, h]``, or this rank's part of the sequence, where it is divided.
            mask: See ``attend``.

        Returns:
            As ``hidden``.
        """
        projected = self.heads_of(self.qkv(hidden))
        query, key, value = torch.split(projected, [self.num_heads, self.num_groups, self.num_groups], dim=1)
        if self.rotary is not None:
            query, key = self.rotary.turned(query, key)
        return self.attend(query, key, value, mask)


class CrossAttention(Attention):
    """Attention of a sequence to another one, the projections of keys and values fused.

    Args:
        config: Sizes.
        parallel: The ranks that share the heads.
        bias, scale: See ``Attention``.
    """

    def __init__(
        self, config: TransformerConfig, parallel: TensorParallel, *, bias: bool = True, scale: float | None = None
    ) -> None:
        super().__init__(config, parallel, causal=False, bias=bias, scale=scale)
        width, of_groups = config.num_heads * self.head_size, config.key_value_heads * self.head_size
        self.query = ColumnParallelLinear(config.hidden_size, width, parallel, bias=bias)
        segments = even_segments([of_groups] * 2, parallel)
        self.key_value = ColumnParallelLinear(config.hidden_size, segments, parallel, bias=bias)

    @torch.no_grad()
    def scale_queries(self, factor: float) -> None:
        """Multiply the rows of weight that make the queries."""
        self.query.weight.mul_(factor)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Look from ``hidden`` at ``memory``.

        Args:
            hidden: ``[b, s, h]``, or this rank's part of the sequence, where it is divided.
            memory: ``[b, other s, h]``, or likewise.
            mask: See ``attend``.

        Returns:
            As ``hidden``.
        """
        key, value = self.heads_of(self.key_value(memory)).chunk(2, dim=1)
        return self.attend(self.heads_of(self.query(hidden)), key, value, mask)


def later_positions(length: int, device: torch.device) -> Tensor:
    """Return ``[length, length]``, true where the column stands behind the row."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
