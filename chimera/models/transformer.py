"""The parts BERT and GPT are built from: attention, feed-forward, one block's parameters, and initialisation.

A block here owns its parts and their initial values; the order of normalisation and residual is the one thing that
differs between the two architectures, so each states it in its own file, as it does what fields a layer reads.

Every layer can be constructed under ``torch.device("meta")``: constructors allocate parameters and nothing else, and
``reset_parameters`` writes all of them. Knows no stages, no schedules and no random keys: dropout and initial values
draw from torch's default generator, which whoever runs the layer has seeded.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from chimera.errors import ConfigError
from chimera.models.config import TransformerConfig
from chimera.tensor.dropout import draw_key, dropout
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear
from chimera.tensor.recompute import RecomputesCore, recomputed
from chimera.tensor.sharding import draw_normal, even_segments, mark_copies
from chimera.tensor.vocabulary import Vocabulary

__all__ = [
    "Decoder",
    "FeedForward",
    "Gelu",
    "SelfAttention",
    "TransformerBlock",
    "first_positions",
    "initialise",
    "padding_mask",
]

Gelu = Literal["none", "tanh"]
"""Which GELU, as ``torch.nn.functional.gelu`` names its approximations: the exact one or GPT-2's."""


class SelfAttention(nn.Module, RecomputesCore):
    """Multi-head attention of a sequence to itself (Vaswani et al. 2017, section 3.2), queries, keys, values fused.

    Rows of ``qkv`` are all queries, then all keys, then all values, each ordered by head. Tensor-parallel ranks share
    the heads.
    """

    def __init__(self, config: TransformerConfig, parallel: TensorParallel, *, causal: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.num_heads = config.num_heads // parallel.size
        self.dropout = config.attention_dropout
        self.causal = causal
        width = config.hidden_size
        self.qkv = ColumnParallelLinear(width, even_segments([width] * 3, parallel), parallel)
        self.output = RowParallelLinear(width, width, parallel)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the positions of each sequence.

        Args:
            hidden: ``[b, s, h]``, or this rank's part of the sequence, where it is divided.
            mask: Added to the scores, broadcastable to ``[b, heads, s, s]``; None adds nothing. Causal attention
                takes none: padding stands behind the last real token, where no real token looks.

        Returns:
            As ``hidden``.
        """
        assert mask is None or not self.causal, "causal attention takes no mask"
        projected = self.qkv(hidden)
        batch, length, width = projected.shape
        heads = projected.view(batch, length, 3, self.num_heads, width // (3 * self.num_heads))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        drops = self.training and self.dropout > 0.0
        # The dropout's key is drawn out here, so that a recomputed core drops the same weights again.
        inputs = (query, key, value, mask, draw_key(hidden.device) if drops else None)
        mixed = recomputed(self._core, *inputs) if self.recompute_core else self._core(*inputs)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width // 3))  # type: ignore[no-any-return]

    def _core(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_key: Tensor | None
    ) -> Tensor:
        """Mix ``value`` by the scores of ``query`` and ``key``, each ``[b, heads, s, h / heads]``."""
        if dropout_key is None:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        # Fused kernels do not promise the mask that this key stands for.
        scores = (query * (1.0 / math.sqrt(query.shape[-1]))) @ key.transpose(-1, -2)
        if self.causal:
            length = scores.shape[-1]
            scores += torch.full((length, length), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
        if mask is not None:
            scores += mask
        weights = scores.softmax(-1)
        part = self.parallel.part_along(1)
        return dropout(weights, self.dropout, training=True, part=part, key=dropout_key) @ value


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, ``[…, h]`` to ``[…, h]``."""

    def __init__(self, config: TransformerConfig, parallel: TensorParallel, *, gelu: Gelu) -> None:
        super().__init__()
        self.gelu = gelu
        self.expand = ColumnParallelLinear(config.hidden_size, config.feed_forward_size, parallel)
        self.contract = RowParallelLinear(config.feed_forward_size, config.hidden_size, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.contract(functional.gelu(self.expand(hidden), approximate=self.gelu))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """The parameters of one block: attention and feed-forward, each with its LayerNorm. A subclass gives ``forward``.

    Args:
        config: Sizes.
        parallel: The ranks that share the block.
        causal: Whether a position sees only itself and those before it.
        gelu: Which GELU.
        residual_std: Initial standard deviation of the two projections that are added to the residual stream; None
            means ``config.initializer_range``, as everywhere else.

    Raises:
        ConfigError: The ranks cannot share it equally.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parallel: TensorParallel = ALONE,
        *,
        causal: bool,
        gelu: Gelu,
        residual_std: float | None = None,
    ) -> None:
        super().__init__()
        config.require_shares(parallel.size)
        self.parallel = parallel
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.residual_std = config.initializer_range if residual_std is None else residual_std
        self.attention = SelfAttention(config, parallel, causal=causal)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config, parallel, gelu=gelu)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        mark_copies(self, parallel, partial=parallel.divides_sequence)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)
        if self.residual_std != self.std:
            draw_normal(self.attention.output.weight, std=self.residual_std)
            draw_normal(self.feed_forward.contract.weight, std=self.residual_std)

    def drop(self, branch: Tensor) -> Tensor:
        """Apply the dropout of a residual branch."""
        return dropout(branch, self.dropout, training=self.training, part=self.parallel.sequence_part)


class Decoder(ColumnParallelLinear):
    """Linear layer from ``[…, h]`` to word logits ``[…, V]``, or to this rank's part of them, ``[…, rows]``.

    Args:
        config: Sizes.
        vocabulary: Which words are this rank's.
        bias: Whether there is one.
        word: The embedding whose weight is this one's too; None gives the decoder its own.
        divided: Whether the input is divided along the sequence, if ranks do that at all.
    """

    def __init__(
        self, config: TransformerConfig, vocabulary: Vocabulary, *, bias: bool, word: nn.Embedding | None, divided: bool
    ) -> None:
        super().__init__(config.hidden_size, vocabulary.segments, vocabulary.parallel, bias=bias, divided=divided)
        self.tied = word is not None
        if word is not None:
            self.weight = word.weight


def initialise(layer: nn.Module, *, std: float) -> None:
    """Write the parameters of every linear, embedding and LayerNorm in ``layer``.

    Weights are drawn from N(0, std²), biases are 0, LayerNorm scales are 1 (Devlin et al. 2019; Radford et al. 2019).
    The weight of a tied decoder is left as it is: the embeddings draw it, wherever they are.
    """
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            if not (isinstance(module, Decoder) and module.tied):
                draw_normal(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)


def first_positions(table: nn.Embedding, length: int, parallel: TensorParallel = ALONE) -> Tensor:
    """Return the embeddings ``[length, h]`` of positions 0 … length − 1, or this rank's part of them.

    Raises:
        ConfigError: The sequence is longer than the table.
    """
    if length > table.num_embeddings:
        raise ConfigError(
            f"a sequence of {length} tokens does not fit [model] max_positions = {table.num_embeddings}; "
            f"shorten the sequences or set max_positions to at least {length}"
        )
    first = table.weight[:length]
    return parallel.part(first, 0) if parallel.divides_sequence else first


def padding_mask(attention_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a mask of real tokens into what attention adds to its scores.

    A hidden position gets the lowest finite number, not −∞: a sequence without any real token then attends evenly
    instead of giving NaN.

    Args:
        attention_mask: ``[b, s]``, 1 at real tokens and 0 at padding; None means that all are real.
        dtype: Type of the scores.

    Returns:
        ``[b, 1, 1, s]``, or None if nothing needs hiding. On an accelerator the mask is always kept, since looking at
        its values would stall the host until the device has caught up.
    """
    if attention_mask is None or (attention_mask.device.type == "cpu" and bool(attention_mask.all())):
        return None
    mask = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device)
    return mask.masked_fill_(attention_mask == 0, torch.finfo(dtype).min)[:, None, None, :]
