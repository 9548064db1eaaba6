"""GPT-2 as a list of layers: embeddings, pre-LayerNorm causal blocks, and the final LayerNorm with the decoder.

The architecture of Radford et al. 2019, with its initialisation: projections onto the residual stream are narrower by
√(2 · layers). Each layer is called with the previous layer's tensors and the micro-batch fields it lists in ``fields``.
Knows nothing of stages, and shifts no labels: a label is the word that follows its position.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from chimera.models.config import TransformerConfig
from chimera.models.losses import Term, count_labels, cross_entropy_term
from chimera.models.transformer import Decoder, TransformerBlock, first_positions, initialise
from chimera.tensor.dropout import dropout
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.sharding import mark_copies
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding

__all__ = ["GptBlock", "GptConfig", "GptEmbeddings", "GptHead", "GptLoss", "gpt_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig(TransformerConfig):
    """Sizes of a GPT-2; see ``TransformerConfig``. The decoder has no bias."""

    max_positions: int = 1024
    layer_norm_eps: float = 1e-5


def gpt_layers(config: GptConfig, parallel: TensorParallel = ALONE) -> list[nn.Module]:
    """Build the layers: ``GptEmbeddings``, ``num_layers`` × ``GptBlock``, ``GptHead``.

    With ``tied_decoder`` the first and the last layer hold the same ``Parameter``. Where tensor-parallel ranks share a
    layer, it is this rank's share.

    Raises:
        ConfigError: The ranks cannot share the layers equally.
    """
    embeddings = GptEmbeddings(config, parallel)
    blocks = [GptBlock(config, parallel) for _ in range(config.num_layers)]
    head = GptHead(config, parallel, word=embeddings.word if config.tied_decoder else None)
    return [embeddings, *blocks, head]


class GptEmbeddings(nn.Module):
    """Sum of word and position embeddings."""

    fields: ClassVar[tuple[str, ...]] = ("input_ids",)

    def __init__(self, config: GptConfig, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = parallel
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.word = VocabularyEmbedding(Vocabulary(config.vocab_size, parallel), config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        mark_copies(self, parallel, partial=parallel.divides_sequence)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed ``[b, s]`` token ids as ``[b, s, h]``, or as this rank's part of that, where the sequence is divided.

        Raises:
            ConfigError: The sequences are longer than ``max_positions``.
            UsageError: They cannot be divided equally.
        """
        summed = self.word(input_ids) + first_positions(self.position, input_ids.shape[1], self.parallel)
        return dropout(summed, self.dropout, training=self.training, part=self.parallel.sequence_part)


class GptBlock(TransformerBlock):
    """One decoder block, LayerNorm at the entry of each residual branch."""

    def __init__(self, config: GptConfig, parallel: TensorParallel = ALONE) -> None:
        residual_std = config.initializer_range / math.sqrt(2 * config.num_layers)
        super().__init__(config, parallel, causal=True, gelu="tanh", residual_std=residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[b, s, h]``, or this rank's part, to as much; no position sees a later one."""
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden)))
        return hidden + self.drop(self.feed_forward(self.feed_forward_norm(hidden)))


class GptHead(nn.Module):
    """Final LayerNorm and the decoder.

    Args:
        config: Sizes.
        parallel: The ranks that share the decoder.
        word: The word embedding whose weight is the decoder's as well; None gives the decoder its own.
    """

    def __init__(
        self, config: GptConfig, parallel: TensorParallel = ALONE, *, word: nn.Embedding | None = None
    ) -> None:
        super().__init__()
        self.std = config.initializer_range
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
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


class GptLoss:
    """Cross-entropy of the next word, as the term ``lm``.

    The target is a mapping with ``labels`` ``[b, s]``: at each position the word that follows it, or
    ``IGNORED_LABEL``.

    Args:
        vocabulary: How tensor-parallel ranks share the words; None where nobody does.

    Attributes:
        fields: of the micro-batch that it takes.
        terms: names of the terms.
    """

    fields: ClassVar[tuple[str, ...]] = ("labels",)
    terms: ClassVar[tuple[str, ...]] = ("lm",)

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self.vocabulary = vocabulary

    def __call__(self, output: Tensor, target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return ``{"lm": (sum, count)}`` for the logits of ``GptHead``."""
        return {"lm": cross_entropy_term(output, target["labels"], self.vocabulary)}

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the count of the term."""
        return {"lm": count_labels(target["labels"])}
