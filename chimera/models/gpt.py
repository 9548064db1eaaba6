"""GPT-2 and GPT-3 as a list of layers: embeddings, pre-LayerNorm causal blocks, final LayerNorm with the decoder.

The architecture of Radford et al. 2019, with its initialisation: projections onto the residual stream are narrower by
√(2 · layers). Brown et al. 2020 (arXiv 2005.14165) size it larger; attention is dense in all blocks here. Each layer is
called with the previous layer's tensors and the micro-batch fields it lists in ``fields``. Knows nothing of stages, and
shifts no labels: a label is the word that follows its position.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from chimera.models.config import Family, TransformerConfig
from chimera.models.transformer import BlockForm, LanguageModelHead, PreNormBlock, first_positions, initialise
from chimera.tensor.dropout import dropout
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.sharding import mark_copies
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding

__all__ = ["GptBlock", "GptConfig", "GptEmbeddings", "gpt_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig(TransformerConfig):
    """Sizes of a GPT; see ``TransformerConfig``. The decoder has no bias."""

    family: Family = "gpt"
    max_positions: int = 1024
    layer_norm_eps: float = 1e-5


def gpt_layers(config: GptConfig, parallel: TensorParallel = ALONE) -> list[nn.Module]:
    """Build the layers: ``GptEmbeddings``, ``num_layers`` × ``GptBlock``, ``LanguageModelHead``.

    With ``tied_decoder`` the first and the last layer hold the same ``Parameter``. Where tensor-parallel ranks share a
    layer, it is this rank's share.

    Raises:
        ConfigError: The ranks cannot share the layers equally.
    """
    embeddings = GptEmbeddings(config, parallel)
    blocks = [GptBlock(config, parallel) for _ in range(config.num_layers)]
    head = LanguageModelHead(config, parallel, rms=False, word=embeddings.word if config.tied_decoder else None)
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


class GptBlock(PreNormBlock):
    """One block; no position sees a later one."""

    def __init__(self, config: GptConfig, parallel: TensorParallel = ALONE) -> None:
        residual_std = config.initializer_range / math.sqrt(2 * config.num_layers)
        form = BlockForm(causal=True, activation="gelu-tanh")
        super().__init__(config, parallel, form=form, residual_std=residual_std)
