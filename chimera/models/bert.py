"""BERT for pre-training as a list of layers: embeddings, post-LayerNorm blocks, and the head with both its tasks.

The architecture of Devlin et al. 2019 (arXiv 1810.04805), equal to transformers' ``BertForPreTraining``. Each layer is
called with the previous layer's tensors and the micro-batch fields it lists in ``fields``. Knows nothing of stages: who
cuts the list, where a layer runs and who seeds its dropout is the caller's matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from chimera.models.config import TransformerConfig, require_count
from chimera.models.losses import IGNORED_LABEL, Term, count_labels, cross_entropy_term
from chimera.models.transformer import (
    BlockForm,
    Decoder,
    TransformerBlock,
    first_positions,
    initialise,
    padding_mask,
)
from chimera.tensor.dropout import dropout
from chimera.tensor.linear import Linear
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.regions import gather_from_sequence_region, scatter_to_sequence_region
from chimera.tensor.sharding import mark_copies
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding

__all__ = ["BertBlock", "BertConfig", "BertEmbeddings", "BertHead", "BertPretrainingLoss", "bert_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(TransformerConfig):
    """Sizes of a BERT; see ``TransformerConfig`` for the shared ones.

    Attributes:
        type_vocab_size: Number of token types (2: first and second segment).
    """

    type_vocab_size: int = 2

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)  # zero-argument super() fails in a dataclass with slots
        require_count("type_vocab_size", self.type_vocab_size)


def bert_layers(config: BertConfig, parallel: TensorParallel = ALONE) -> list[nn.Module]:
    """Build the layers: ``BertEmbeddings``, ``num_layers`` × ``BertBlock``, ``BertHead``.

    With ``tied_decoder`` the first and the last layer hold the same ``Parameter``. Where tensor-parallel ranks share a
    layer, it is this rank's share.

    Raises:
        ConfigError: The ranks cannot share the layers equally.
    """
    embeddings = BertEmbeddings(config, parallel)
    blocks = [BertBlock(config, parallel) for _ in range(config.num_layers)]
    head = BertHead(config, parallel, word=embeddings.word if config.tied_decoder else None)
    return [embeddings, *blocks, head]


class BertEmbeddings(nn.Module):
    """Sum of word, position and token-type embeddings, normalised."""

    fields: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids")

    def __init__(self, config: BertConfig, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = parallel
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.word = VocabularyEmbedding(Vocabulary(config.vocab_size, parallel), config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        mark_copies(self, parallel, partial=parallel.divides_sequence)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Embed ``[b, s]`` token ids as ``[b, s, h]``; without ``token_type_ids`` every token is of type 0.

        Where the sequence is divided, this rank's part of it is returned.

        Raises:
            ConfigError: The sequences are longer than ``max_positions``.
            UsageError: They cannot be divided equally.
        """
        parallel = self.parallel
        words = self.word(input_ids)
        types = self.token_type.weight[0]
        if token_type_ids is not None:
            types = self.token_type(scatter_to_sequence_region(token_type_ids, parallel))
        summed = words + types + first_positions(self.position, input_ids.shape[1], parallel)
        return dropout(self.norm(summed), self.dropout, training=self.training, part=parallel.sequence_part)


class BertBlock(TransformerBlock):
    """One encoder block, LayerNorm after each residual sum."""

    fields: ClassVar[tuple[str, ...]] = ("attention_mask",)

    def __init__(self, config: BertConfig, parallel: TensorParallel = ALONE) -> None:
        super().__init__(config, parallel, form=BlockForm(causal=False, activation="gelu"))

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map ``[b, s, h]``, or this rank's part, to as much.

        Args:
            hidden: Of the previous layer.
            attention_mask: ``[b, s]`` of the whole sequence, 1 at real tokens; None if all are.
        """
        attended = self.attention(hidden, padding_mask(attention_mask, hidden.dtype))
        hidden = self.attention_norm(hidden + self.drop(attended))
        return self.feed_forward_norm(hidden + self.drop(self.feed_forward(hidden)))  # type: ignore[no-any-return]


class BertHead(nn.Module):
    """Pooler with the next-sentence classifier, and the masked-word transform with its decoder.

    Tensor-parallel ranks share the decoder alone and do the rest alike, each for the whole sequence.

    Args:
        config: Sizes.
        parallel: The ranks that share it.
        word: The word embedding whose weight is the decoder's as well; None gives the decoder its own. Its bias is its
            own either way.
    """

    fields: ClassVar[tuple[str, ...]] = ("mlm_labels",)

    def __init__(
        self, config: BertConfig, parallel: TensorParallel = ALONE, *, word: nn.Embedding | None = None
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.std = config.initializer_range
        self.pooler = Linear(config.hidden_size, config.hidden_size)
        self.nsp = Linear(config.hidden_size, 2)
        self.transform = Linear(config.hidden_size, config.hidden_size)
        self.transform_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        vocabulary = Vocabulary(config.vocab_size, parallel)
        self.decoder = Decoder(config, vocabulary, bias=True, word=word, divided=False)
        mark_copies(self, parallel, partial=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator, but for a tied weight: the embeddings draw that."""
        initialise(self, std=self.std)

    def forward(self, hidden: Tensor, mlm_labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the logits of both tasks.

        Args:
            hidden: ``[b, s, h]``, or this rank's part of the sequence, where it is divided.
            mlm_labels: ``[b, s]``; given these, only positions whose label is not ``IGNORED_LABEL`` are decoded (with
                15 % of the words masked that is a seventh of the work and memory). On an accelerator finding them
                makes the host wait once.

        Returns:
            Word logits, ``[number of labelled positions, V]`` in row order or ``[b, s, V]`` without labels, of this
            rank's words alone where ranks share them; and next-sentence logits ``[b, 2]``.
        """
        hidden = gather_from_sequence_region(hidden, self.parallel)
        nsp_logits = self.nsp(torch.tanh(self.pooler(hidden[:, 0])))
        chosen = hidden if mlm_labels is None else hidden[mlm_labels != IGNORED_LABEL]
        transformed = self.transform_norm(functional.gelu(self.transform(chosen)))
        return self.decoder(transformed), nsp_logits


class BertPretrainingLoss:
    """Cross-entropy of the masked words and of the next sentence, as the terms ``mlm`` and ``nsp``.

    The target is a mapping with ``mlm_labels`` ``[b, s]`` and ``nsp_labels`` ``[b]``, ``IGNORED_LABEL`` where there is
    nothing to predict.

    Args:
        vocabulary: How tensor-parallel ranks share the words; None where nobody does.

    Attributes:
        fields: of the micro-batch that it takes.
        terms: names of the terms.
        told_right: the term whose right answers ``num_right`` counts.
    """

    fields: ClassVar[tuple[str, ...]] = ("mlm_labels", "nsp_labels")
    terms: ClassVar[tuple[str, ...]] = ("mlm", "nsp")
    told_right: ClassVar[str | None] = "nsp"

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self.vocabulary = vocabulary

    def __call__(self, output: tuple[Tensor, Tensor], target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return ``{"mlm": (sum, count), "nsp": (sum, count)}`` for what ``BertHead`` returns, in either form."""
        mlm_logits, nsp_logits = output
        mlm_labels = target["mlm_labels"]
        if mlm_logits.ndim == 2:  # only labelled positions were decoded
            mlm_labels = mlm_labels[mlm_labels != IGNORED_LABEL]
        return {
            "mlm": cross_entropy_term(mlm_logits, mlm_labels, self.vocabulary),
            "nsp": cross_entropy_term(nsp_logits, target["nsp_labels"]),
        }

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the count of each term."""
        return {"mlm": count_labels(target["mlm_labels"]), "nsp": count_labels(target["nsp_labels"])}

    def num_right(self, output: tuple[Tensor, Tensor], target: Mapping[str, Tensor]) -> int:
        """Return how many next sentences are told right."""
        return int((output[1].argmax(-1) == target["nsp_labels"]).sum())
