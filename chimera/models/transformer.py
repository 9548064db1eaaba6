"""The parts that blocks are built from: one block's parameters, decoder, initialisation, positions and masks.

A block here owns its parts and their initial values; the order of normalisation and residual is what each architecture
states in its own file, as it does what fields a layer reads.

Every layer can be constructed under ``torch.device("meta")``: constructors allocate parameters and nothing else, and
``reset_parameters`` writes all of them. Knows no stages, no schedules and no random keys: dropout and initial values
draw from torch's default generator, which whoever runs the layer has seeded.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from chimera.errors import ConfigError
from chimera.models.attention import SelfAttention
from chimera.models.config import TransformerConfig
from chimera.models.feed_forward import Activation, FeedForward
from chimera.models.rotary import RotaryEmbedding
from chimera.tensor.dropout import dropout
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.parallel_linear import ColumnParallelLinear
from chimera.tensor.sharding import draw_normal, mark_copies
from chimera.tensor.vocabulary import Vocabulary

__all__ = [
    "BlockForm",
    "Decoder",
    "LanguageModelHead",
    "PreNormBlock",
    "Spec",
    "TransformerBlock",
    "first_positions",
    "initialise",
    "make_norm",
    "padding_mask",
    "require_length",
    "tie",
]

_TIED = "tied"

Spec = TypeVar("Spec")
"""Shape and type of one tensor that passes between layers, however the caller describes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """What tells the blocks of one architecture from another's.

    Attributes:
        causal: whether a position sees only itself and those before it.
        activation: of the feed-forward.
        gated: whether that has a gate.
        bias: whether linear layers have biases.
        rms_norm: whether norms divide by the root mean square alone (Zhang and Sennrich 2019, arXiv 1910.07467).
        scale: of attention scores; None means 1 / √head size.
        rotary: what turns queries and keys; None for nothing.
        inner_dropout: probability between the two layers of the feed-forward.
    """

    causal: bool
    activation: Activation
    gated: bool = False
    bias: bool = True
    rms_norm: bool = False
    scale: float | None = None
    rotary: RotaryEmbedding | None = None
    inner_dropout: float = 0.0


class TransformerBlock(nn.Module):
    """The parameters of one block: attention and feed-forward, each with its norm. A subclass gives ``forward``.

    Args:
        config: Sizes.
        parallel: The ranks that share the block.
        form: Of the architecture.
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
        form: BlockForm,
        residual_std: float | None = None,
    ) -> None:
        super().__init__()
        config.require_shares(parallel.size)
        self.parallel = parallel
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.residual_std = config.initializer_range if residual_std is None else residual_std
        self.attention = SelfAttention(
            config, parallel, causal=form.causal, bias=form.bias, scale=form.scale, rotary=form.rotary
        )
        self.attention_norm = make_norm(config, rms=form.rms_norm)
        self.feed_forward = FeedForward(
            config,
            parallel,
            activation=form.activation,
            gated=form.gated,
            bias=form.bias,
            dropout=form.inner_dropout,
        )
        self.feed_forward_norm = make_norm(config, rms=form.rms_norm)
        mark_copies(self, parallel, partial=parallel.divides_sequence)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)
        if self.residual_std != self.std:
            draw_normal(self.attention.output.weight, std=self.residual_std)
            draw_normal(self.feed_forward.contract.weight, std=self.residual_std)

    def output_spec(self, inputs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """Return the shapes and types of what comes out: those of what goes in."""
        return inputs

    def drop(self, branch: Tensor) -> Tensor:
        """Apply the dropout of a residual branch."""
        return dropout(branch, self.dropout, training=self.training, part=self.parallel.sequence_part)


class PreNormBlock(TransformerBlock):
    """A block with a norm at the entry of each residual branch."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[b, s, h]``, or this rank's part, to as much."""
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden)))
        return hidden + self.drop(self.feed_forward(self.feed_forward_norm(hidden)))


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
        if word is not None:
            tie(self, word)


class LanguageModelHead(nn.Module):
    """Final norm and the decoder.

    Args:
        config: Sizes.
        parallel: The ranks that share the decoder.
        rms: Whether the norm divides by the root mean square alone.
        word: The word embedding whose weight is the decoder's as well; None gives the decoder its own.
    """

    def __init__(
        self, config: TransformerConfig, parallel: TensorParallel = ALONE, *, rms: bool, word: nn.Embedding | None
    ) -> None:
        super().__init__()
        self.std = config.initializer_range
        self.norm = make_norm(config, rms=rms)
        vocabulary = Vocabulary(config.vocab_size, parallel)
        self.decoder = Decoder(config, vocabulary, bias=False, word=word, divided=True)
        mark_copies(self, parallel, partial=parallel.divides_sequence)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator, but for a tied weight: the embeddings draw that."""
        initialise(self, std=self.std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[b, s, h]``, or this rank's part, to word logits ``[b, s, V]``, or to those of this rank's words."""
        return self.decoder(self.norm(hidden))  # type: ignore[no-any-return]


def make_norm(config: TransformerConfig, *, rms: bool) -> nn.Module:
    """Return a norm of the residual stream."""
    kind = nn.RMSNorm if rms else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layer_norm_eps)


def tie(module: nn.Linear | nn.Embedding, owner: nn.Embedding) -> None:
    """Make the weight of ``owner``, which draws it, that of ``module`` too."""
    module.weight = owner.weight
    setattr(module, _TIED, True)


def initialise(layer: nn.Module, *, std: float) -> None:
    """Write the parameters of every linear, embedding and norm in ``layer``.

    Weights are drawn from N(0, std²), biases are 0, scales of norms are 1 (Devlin et al. 2019; Radford et al. 2019).
    A tied weight is left as it is: its owner draws it, wherever that is.
    """
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not getattr(module, _TIED, False):
            draw_normal(module.weight, std=std)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)


def first_positions(table: nn.Embedding, length: int, parallel: TensorParallel = ALONE) -> Tensor:
    """Return the embeddings ``[length, h]`` of positions 0 … length − 1, or this rank's part of them.

    Raises:
        ConfigError: The sequence is longer than the table.
    """
    require_length(length, table.num_embeddings)
    first = table.weight[:length]
    return parallel.part(first, 0) if parallel.divides_sequence else first


def require_length(length: int, max_positions: int) -> None:
    """Raise ``ConfigError`` for a sequence that is longer than ``max_positions``."""
    if length > max_positions:
        raise ConfigError(
            f"a sequence of {length} tokens does not fit [model] max_positions = {max_positions}; "
            f"shorten the sequences or set max_positions to at least {length}"
        )


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
