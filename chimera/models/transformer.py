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
from chimera.tensor.linear import Linear

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


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself (Vaswani et al. 2017, section 3.2), queries, keys, values fused.

    Rows of ``qkv`` are all queries, then all keys, then all values, each ordered by head.
    """

    def __init__(self, config: TransformerConfig, *, causal: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        self.causal = causal
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the positions of each sequence.

        Args:
            hidden: ``[b, s, h]``.
            mask: Added to the scores, broadcastable to ``[b, heads, s, s]``; None adds nothing. Causal attention
                takes none: padding stands behind the last real token, where no real token looks.

        Returns:
            ``[b, s, h]``.
        """
        assert mask is None or not self.causal, "causal attention takes no mask"
        batch, length, width = hidden.shape
        heads = self.qkv(hidden).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.training and self.dropout > 0.0:
            mixed = self._explicit(query, key, value, mask)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def _explicit(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention with every random draw taken from the default generator, which fused kernels do not promise."""
        scores = (query * (1.0 / math.sqrt(query.shape[-1]))) @ key.transpose(-1, -2)
        if self.causal:
            length = scores.shape[-1]
            scores += torch.full((length, length), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
        if mask is not None:
            scores += mask
        return functional.dropout(scores.softmax(-1), self.dropout) @ value


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, ``[…, h]`` to ``[…, h]``."""

    def __init__(self, config: TransformerConfig, *, gelu: Gelu) -> None:
        super().__init__()
        self.gelu = gelu
        self.expand = Linear(config.hidden_size, config.feed_forward_size)
        self.contract = Linear(config.feed_forward_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.contract(functional.gelu(self.expand(hidden), approximate=self.gelu))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """The parameters of one block: attention and feed-forward, each with its LayerNorm. A subclass gives ``forward``.

    Args:
        config: Sizes.
        causal: Whether a position sees only itself and those before it.
        gelu: Which GELU.
        residual_std: Initial standard deviation of the two projections that are added to the residual stream; None
            means ``config.initializer_range``, as everywhere else.
    """

    def __init__(
        self, config: TransformerConfig, *, causal: bool, gelu: Gelu, residual_std: float | None = None
    ) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.residual_std = config.initializer_range if residual_std is None else residual_std
        self.attention = SelfAttention(config, causal=causal)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config, gelu=gelu)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)
        if self.residual_std != self.std:
            nn.init.normal_(self.attention.output.weight, std=self.residual_std)
            nn.init.normal_(self.feed_forward.contract.weight, std=self.residual_std)

    def drop(self, branch: Tensor) -> Tensor:
        """Apply the dropout of a residual branch."""
        return functional.dropout(branch, self.dropout, self.training)


class Decoder(Linear):
    """Linear layer from ``[…, h]`` to word logits ``[…, V]``; ``word``'s weight is its weight too, where given."""

    def __init__(self, config: TransformerConfig, *, bias: bool, word: nn.Embedding | None) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=bias)
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
                nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)


def first_positions(table: nn.Embedding, length: int) -> Tensor:
    """Return the embeddings ``[length, h]`` of positions 0 … length − 1.

    Raises:
        ConfigError: The sequence is longer than the table.
    """
    if length > table.num_embeddings:
        raise ConfigError(
            f"a sequence of {length} tokens does not fit [model] max_positions = {table.num_embeddings}; "
            f"shorten the sequences or set max_positions to at least {length}"
        )
    return table.weight[:length]


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
