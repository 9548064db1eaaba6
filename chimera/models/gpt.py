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
from torch.nn import functional

from chimera.models.config import TransformerConfig
from chimera.models.losses import Term, count_labels, cross_entropy_term
from chimera.models.transformer import Decoder, TransformerBlock, first_positions, initialise

__all__ = ["GptBlock", "GptConfig", "GptEmbeddings", "GptHead", "GptLoss", "gpt_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig(TransformerConfig):
    """Sizes of a GPT-2; see ``TransformerConfig``. The decoder has no bias."""

    max_positions: int = 1024
    layer_norm_eps: float = 1e-5


def gpt_layers(config: GptConfig) -> list[nn.Module]:
    """Build the layers: ``GptEmbeddings``, ``num_layers`` × ``GptBlock``, ``GptHead``.

    With ``tied_decoder`` the first and the last layer hold the same ``Parameter``.
    """
    embeddings = GptEmbeddings(config)
    blocks = [GptBlock(config) for _ in range(config.num_layers)]
    head = GptHead(config, word=embeddings.word if config.tied_decoder else None)
    return [embeddings, *blocks, head]


class GptEmbeddings(nn.Module):
    """Sum of word and position embeddings."""

    fields: ClassVar[tuple[str, ...]] = ("input_ids",)

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed ``[b, s]`` token ids as ``[b, s, h]``.

        Raises:
            ConfigError: The sequences are longer than ``max_positions``.
        """
        summed = self.word(input_ids) + first_positions(self.position, input_ids.shape[1])
        return functional.dropout(summed, self.dropout, self.training)


class GptBlock(TransformerBlock):
    """One decoder block, LayerNorm at the entry of each residual branch."""

    def __init__(self, config: GptConfig) -> None:
        residual_std = config.initializer_range / math.sqrt(2 * config.num_layers)
        super().__init__(config, causal=True, gelu="tanh", residual_std=residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[b, s, h]`` to ``[b, s, h]``; no position sees a later one."""
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden)))
        return hidden + self.drop(self.feed_forward(self.feed_forward_norm(hidden)))


class GptHead(nn.Module):
    """Final LayerNorm and the decoder.

    Args:
        config: Sizes.
        word: The word embedding whose weight is the decoder's as well; None gives the decoder its own.
    """

    def __init__(self, config: GptConfig, *, word: nn.Embedding | None = None) -> None:
        super().__init__()
        self.std = config.initializer_range
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = Decoder(config, bias=False, word=word)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator, but for a tied weight: the embeddings draw that."""
        initialise(self, std=self.std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[b, s, h]`` to word logits ``[b, s, V]``."""
        return self.decoder(self.norm(hidden))  # type: ignore[no-any-return]


class GptLoss:
    """Cross-entropy of the next word, as the term ``lm``.

    The target is a mapping with ``labels`` ``[b, s]``: at each position the word that follows it, or
    ``IGNORED_LABEL``.

    Attributes:
        fields: of the micro-batch that it takes.
        terms: names of the terms.
    """

    fields: ClassVar[tuple[str, ...]] = ("labels",)
    terms: ClassVar[tuple[str, ...]] = ("lm",)

    def __call__(self, output: Tensor, target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return ``{"lm": (sum, count)}`` for the logits of ``GptHead``."""
        return {"lm": cross_entropy_term(output, target["labels"])}

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the count of the term."""
        return {"lm": count_labels(target["labels"])}
