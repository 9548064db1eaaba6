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
from chimera.models.transformer import Decoder, TransformerBlock, first_positions, initialise, padding_mask
from chimera.tensor.linear import Linear

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


def bert_layers(config: BertConfig) -> list[nn.Module]:
    """Build the layers: ``BertEmbeddings``, ``num_layers`` × ``BertBlock``, ``BertHead``.

    With ``tied_decoder`` the first and the last layer hold the same ``Parameter``.
    """
    embeddings = BertEmbeddings(config)
    blocks = [BertBlock(config) for _ in range(config.num_layers)]
    head = BertHead(config, word=embeddings.word if config.tied_decoder else None)
    return [embeddings, *blocks, head]


class BertEmbeddings(nn.Module):
    """Sum of word, position and token-type embeddings, normalised."""

    fields: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids")

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.std = config.initializer_range
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator."""
        initialise(self, std=self.std)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Embed ``[b, s]`` token ids as ``[b, s, h]``; without ``token_type_ids`` every token is of type 0.

        Raises:
            ConfigError: The sequences are longer than ``max_positions``.
        """
        types = self.token_type.weight[0] if token_type_ids is None else self.token_type(token_type_ids)
        summed = self.word(input_ids) + types + first_positions(self.position, input_ids.shape[1])
        return functional.dropout(self.norm(summed), self.dropout, self.training)


class BertBlock(TransformerBlock):
    """One encoder block, LayerNorm after each residual sum."""

    fields: ClassVar[tuple[str, ...]] = ("attention_mask",)

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, causal=False, gelu="none")

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map ``[b, s, h]`` to ``[b, s, h]``; ``attention_mask`` ``[b, s]`` is 1 at real tokens, None if all are."""
        attended = self.attention(hidden, padding_mask(attention_mask, hidden.dtype))
        hidden = self.attention_norm(hidden + self.drop(attended))
        return self.feed_forward_norm(hidden + self.drop(self.feed_forward(hidden)))  # type: ignore[no-any-return]


class BertHead(nn.Module):
    """Pooler with the next-sentence classifier, and the masked-word transform with its decoder.

    Args:
        config: Sizes.
        word: The word embedding whose weight is the decoder's as well; None gives the decoder its own. Its bias is its
            own either way.
    """

    fields: ClassVar[tuple[str, ...]] = ("mlm_labels",)

    def __init__(self, config: BertConfig, *, word: nn.Embedding | None = None) -> None:
        super().__init__()
        self.std = config.initializer_range
        self.pooler = Linear(config.hidden_size, config.hidden_size)
        self.nsp = Linear(config.hidden_size, 2)
        self.transform = Linear(config.hidden_size, config.hidden_size)
        self.transform_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = Decoder(config, bias=True, word=word)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the default generator, but for a tied weight: the embeddings draw that."""
        initialise(self, std=self.std)

    def forward(self, hidden: Tensor, mlm_labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the logits of both tasks.

        Args:
            hidden: ``[b, s, h]``.
            mlm_labels: ``[b, s]``; given these, only positions whose label is not ``IGNORED_LABEL`` are decoded (with
                15 % of the words masked that is a seventh of the work and memory). On an accelerator finding them
                makes the host wait once.

        Returns:
            Word logits, ``[number of labelled positions, V]`` in row order or ``[b, s, V]`` without labels, and
            next-sentence logits ``[b, 2]``.
        """
        nsp_logits = self.nsp(torch.tanh(self.pooler(hidden[:, 0])))
        chosen = hidden if mlm_labels is None else hidden[mlm_labels != IGNORED_LABEL]
        transformed = self.transform_norm(functional.gelu(self.transform(chosen)))
        return self.decoder(transformed), nsp_logits


class BertPretrainingLoss:
    """Cross-entropy of the masked words and of the next sentence, as the terms ``mlm`` and ``nsp``.

    The target is a mapping with ``mlm_labels`` ``[b, s]`` and ``nsp_labels`` ``[b]``, ``IGNORED_LABEL`` where there is
    nothing to predict.

    Attributes:
        fields: of the micro-batch that it takes.
        terms: names of the terms.
    """

    fields: ClassVar[tuple[str, ...]] = ("mlm_labels", "nsp_labels")
    terms: ClassVar[tuple[str, ...]] = ("mlm", "nsp")

    def __call__(self, output: tuple[Tensor, Tensor], target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return ``{"mlm": (sum, count), "nsp": (sum, count)}`` for what ``BertHead`` returns, in either form."""
        mlm_logits, nsp_logits = output
        mlm_labels = target["mlm_labels"]
        if mlm_logits.ndim == 2:  # only labelled positions were decoded
            mlm_labels = mlm_labels[mlm_labels != IGNORED_LABEL]
        return {
            "mlm": cross_entropy_term(mlm_logits, mlm_labels),
            "nsp": cross_entropy_term(nsp_logits, target["nsp_labels"]),
        }

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the count of each term."""
        return {"mlm": count_labels(target["mlm_labels"]), "nsp": count_labels(target["nsp_labels"])}
