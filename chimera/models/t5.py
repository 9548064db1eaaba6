"""T5 as a list of layers: embeddings, encoder blocks, the bridge to the decoder, decoder blocks, and the head.

The architecture of Raffel et al. 2020 (arXiv 1910.10683) and, with a gate and a head of its own, of T5 1.1; equal to
transformers' ``T5ForConditionalGeneration``. All blocks of a stack share one table of relative position biases, and
three layers share the word embedding: over a pipeline these are tied parameters. From the bridge on the encoder's
output travels with the decoder's hidden states through every decoder block. Knows nothing of stages, and shifts no
labels: ``decoder_input_ids`` are the labels moved on by one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from chimera.errors import ConfigError
from chimera.models.attention import CrossAttention, SelfAttention
from chimera.models.config import Family, TransformerConfig, require_count
from chimera.models.feed_forward import FeedForward
from chimera.models.relative_bias import RelativeBias
from chimera.models.transformer import (
    BlockForm,
    LanguageModelHead,
    Spec,
    TransformerBlock,
    initialise,
    make_norm,
    padding_mask,
    tie,
)
from chimera.tensor.dropout import dropout
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.sharding import draw_normal, mark_copies
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding

__all__ = ["T5Block", "T5Bridge", "T5Config", "T5DecoderBlock", "T5Embeddings", "T5EncoderBlock", "T5Head", "t5_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(TransformerConfig):
    """Sizes of a T5; see ``TransformerConfig`` for the shared ones. ``num_layers`` are those of the encoder.

    Initial weights have a deviation that follows from the width of what they are multiplied by, as T5's authors have
    it; ``initializer_range`` is a factor on all of them. ``dropout`` is applied inside the feed-forward too.
    ``max_positions`` bounds nothing in the model, whose positions are relative.

    Attributes:
        num_decoder_layers: Blocks of the decoder; None for as many as the encoder has.
        key_value_size: Width of a head; None for ``hidden_size / num_heads``.
        gated: Whether the feed-forward is T5 1.1's, GELU with a gate, rather than a ReLU.
        relative_buckets: Classes of distances that have a bias each.
        relative_max_distance: Distance in tokens from which on all are in the last class.
    """

    family: Family = "t5"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 1.0
    layer_norm_eps: float = 1e-6
    num_decoder_layers: int | None = None
    key_value_size: int | None = None
    gated: bool = False
    relative_buckets: int = 32
    relative_max_distance: int = 128

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)  # zero-argument super() fails in a dataclass with slots
        for option in ("num_decoder_layers", "key_value_size"):
            if getattr(self, option) is not None:
                require_count(option, getattr(self, option))
        for option in ("relative_buckets", "relative_max_distance"):
            require_count(option, getattr(self, option))
        if self.relative_buckets % 4 or self.relative_max_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"[model] relative_buckets = {self.relative_buckets} and relative_max_distance = "
                f"{self.relative_max_distance} give no classes; buckets must be a multiple of 4, and the distance "
                "above half of them; T5 has 32 and 128"
            )

    def require_equal_heads(self) -> None:
        """Refuse heads of unequal size, where the option does not say their size."""
        if self.key_value_size is None:
            TransformerConfig.require_equal_heads(self)

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads if self.key_value_size is None else self.key_value_size

    @property
    def num_decoder_blocks(self) -> int:
        """Blocks of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def stacks(self) -> tuple[int, ...]:
        """Blocks of encoder and decoder."""
        return self.num_layers, self.num_decoder_blocks


def t5_layers(config: T5Config, parallel: TensorParallel = ALONE) -> list[nn.Module]:
    """Build ``T5Embeddings``, encoder blocks, ``T5Bridge``, decoder blocks, ``T5Head``.

    Where tensor-parallel ranks share a layer, it is this rank's share.

    Raises:
        ConfigError: The ranks cannot share the layers equally.
    """
    embeddings = T5Embeddings(config, parallel)
    encoder = _stack(config.num_layers, lambda bias, _: T5EncoderBlock(config, parallel, bias=bias))
    bridge = T5Bridge(config, parallel, word=embeddings.word)
    decoder = _stack(
        config.num_decoder_blocks, lambda bias, last: T5DecoderBlock(config, parallel, bias=bias, last=last)
    )
    head = T5Head(config, parallel, word=embeddings.word if config.tied_decoder else None)
    return [embeddings, *encoder, bridge, *decoder, head]


def _stack(count: int, make: "Callable[[RelativeBias | None, bool], T5Block]") -> "list[T5Block]":
    """Build the blocks of one stack, which share the first one's relative biases."""
    first = make(None, count == 1)
    return [first, *(make(first.relative_bias, number == count - 1) for number in range(1, count))]


class T5Embeddings(nn.Module):
    """Word embeddings of the encoder."""

    fields: ClassVar[tuple[str, ...]] = ("input_ids",)

    def __init__(self, config: T5Config, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = parallel
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.word = VocabularyEmbedding(Vocabulary(config.vocab_size, parallel), config.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed ``[b, s]`` token ids as ``[b, s, h]``, or this rank's part, where the sequence is divided."""
        words = self.word(input_ids)
        return dropout(words, self.dropout, training=self.training, part=self.parallel.sequence_part)


class T5Block(TransformerBlock):
    """What blocks of both stacks have: attention and feed-forward behind an RMSNorm each, and the relative biases."""

    def __init__(self, config: T5Config, parallel: TensorParallel, *, causal: bool, bias: RelativeBias | None) -> None:
        form = BlockForm(
            causal=False,  # where it is, the bias hides what is later
            activation="gelu-tanh" if config.gated else "relu",
            gated=config.gated,
            bias=False,
            rms_norm=True,
            scale=1.0,
            inner_dropout=config.dropout,
        )
        super().__init__(config, parallel, form=form)
        self.relative_bias = RelativeBias(
            config.num_heads,
            parallel,
            num_classes=config.relative_buckets,
            max_distance=config.relative_max_distance,
            causal=causal,
            owner=bias,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator, but for tied biases: the first block draws those."""
        initialise(self, std=self.std / math.sqrt(self.attention.qkv.in_features))
        for module in self.modules():
            if isinstance(module, SelfAttention | CrossAttention):
                module.scale_queries(1.0 / math.sqrt(module.head_size))  # since scores are not scaled
                heads_width = module.num_heads * module.head_size * self.parallel.size
                draw_normal(module.output.weight, std=self.std / math.sqrt(heads_width))
            elif isinstance(module, FeedForward):
                inner = module.contract.in_features * self.parallel.size
                draw_normal(module.contract.weight, std=self.std / math.sqrt(inner))

    def biases(self, hidden: Tensor) -> Tensor:
        """Return the relative biases ``[1, heads, s, s]`` for hidden states, of which this rank may have a part."""
        ranks = self.parallel.size if self.parallel.divides_sequence else 1
        biases: Tensor = self.relative_bias(hidden.shape[1] * ranks)
        return biases


class T5EncoderBlock(T5Block):
    """One block of the encoder."""

    fields: ClassVar[tuple[str, ...]] = ("attention_mask",)

    def __init__(self, config: T5Config, parallel: TensorParallel = ALONE, *, bias: RelativeBias | None = None) -> None:
        super().__init__(config, parallel, causal=False, bias=bias)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map ``[b, s, h]``, or this rank's part, to as much.

        Args:
            hidden: Of the previous layer.
            attention_mask: ``[b, s]`` of the whole sequence, 1 at real tokens; None if all are.
        """
        mask, padding = self.biases(hidden), padding_mask(attention_mask, hidden.dtype)
        if padding is not None:
            mask = mask + padding
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden), mask))
        return hidden + self.drop(self.feed_forward(self.feed_forward_norm(hidden)))


class T5Bridge(nn.Module):
    """The encoder's final norm, and the word embeddings of the decoder.

    Args:
        config: Sizes.
        parallel: The ranks that share it.
        word: The encoder's word embedding, whose weight is this one's as well.
    """

    fields: ClassVar[tuple[str, ...]] = ("decoder_input_ids",)

    def __init__(self, config: T5Config, parallel: TensorParallel = ALONE, *, word: nn.Embedding) -> None:
        super().__init__()
        self.parallel = parallel
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.norm = make_norm(config, rms=True)
        self.word = VocabularyEmbedding(Vocabulary(config.vocab_size, parallel), config.hidden_size)
        tie(self.word, word)
        mark_copies(self, parallel, partial=parallel.divides_sequence)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write all parameters again, but for the words: the embeddings draw those."""
        initialise(self, std=self.std)

    def forward(self, hidden: Tensor, decoder_input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedded ``[b, decoder s]`` token ids, and the encoder's output made of ``[b, s, h]``.

        Where the sequence is divided, ``hidden`` and what is returned are this rank's parts.
        """
        memory, words = self._drop(self.norm(hidden)), self._drop(self.word(decoder_input_ids))
        return words, memory

    def _drop(self, values: Tensor) -> Tensor:
        return dropout(values, self.dropout, training=self.training, part=self.parallel.sequence_part)


class T5DecoderBlock(T5Block):
    """One block of the decoder, which looks at the encoder's output and hands it on.

    Args:
        config: Sizes.
        parallel: The ranks that share the block.
        bias: The first block's relative biases; None for the first block itself.
        last: Whether no other block follows, so that the encoder's output need not go on.
    """

    fields: ClassVar[tuple[str, ...]] = ("attention_mask",)

    def __init__(
        self,
        config: T5Config,
        parallel: TensorParallel = ALONE,
        *,
        bias: RelativeBias | None = None,
        last: bool = False,
    ) -> None:
        super().__init__(config, parallel, causal=True, bias=bias)
        self.last = last
        self.cross_attention = CrossAttention(config, parallel, bias=False, scale=1.0)
        self.cross_attention_norm = make_norm(config, rms=True)
        mark_copies(self, parallel, partial=parallel.divides_sequence)
        self.reset_parameters()

    def forward(
        self, hidden: Tensor, memory: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map ``[b, decoder s, h]``, or this rank's part, to as much; no position sees a later one.

        Args:
            hidden: Of the previous layer.
            memory: The encoder's output ``[b, s, h]``, or this rank's part.
            attention_mask: ``[b, s]`` of the encoder's whole sequence, 1 at real tokens; None if all are.

        Returns:
            The hidden states, and ``memory`` where another block follows.
        """
        padding = padding_mask(attention_mask, hidden.dtype)
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden), self.biases(hidden)))
        hidden = hidden + self.drop(self.cross_attention(self.cross_attention_norm(hidden), memory, padding))
        hidden = hidden + self.drop(self.feed_forward(self.feed_forward_norm(hidden)))
        return hidden if self.last else (hidden, memory)

    def output_spec(self, inputs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """Return the shapes and types of what comes out: those of what goes in, or the first of them."""
        return inputs[:1] if self.last else inputs


class T5Head(LanguageModelHead):
    """The decoder's final norm, and word logits.

    Args:
        config: Sizes.
        parallel: The ranks that share it.
        word: The word embedding whose weight is the head's as well; hidden states are then divided by √h, since that
            weight is as large as an embedding's. None gives the head its own.
    """

    def __init__(self, config: T5Config, parallel: TensorParallel = ALONE, *, word: nn.Embedding | None = None) -> None:
        super().__init__(config, parallel, rms=True, word=word)
        self.parallel = parallel
        self.dropout = config.dropout
        self.scale = 1.0 if word is None else 1.0 / math.sqrt(config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[b, s, h]``, or this rank's part, to word logits ``[b, s, V]``, or to those of this rank's words."""
        normed = dropout(self.norm(hidden), self.dropout, training=self.training, part=self.parallel.sequence_part)
        return self.decoder(normed * self.scale)  # type: ignore[no-any-return]
