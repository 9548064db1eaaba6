"""Loss terms as sums with their counts, so that any cut into micro-batches gives the same total.

The total is Σ sum / count with the counts taken over the whole step. A count depends on the labels alone, so it is
known before the first forward. Knows labels and logits; knows no models and no number of micro-batches.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from chimera.tensor.vocabulary import Vocabulary, vocabulary_cross_entropy

__all__ = ["IGNORED_LABEL", "LanguageModelLoss", "Term", "count_labels", "cross_entropy_term"]

IGNORED_LABEL = -100
"""Label of a position that takes no part in the loss."""

Term = tuple[Tensor, Tensor]
"""A sum of losses (0-dim, with a graph) and the number of labels in it (0-dim)."""


def cross_entropy_term(logits: Tensor, labels: Tensor, vocabulary: Vocabulary | None = None) -> Term:
    """Sum the cross-entropies of all labels that are not ``IGNORED_LABEL``.

    Args:
        logits: ``[…, classes]``, or this rank's part of them.
        labels: ``[…]``, class indices or ``IGNORED_LABEL``.
        vocabulary: How tensor-parallel ranks share the classes; None where nobody does.

    Returns:
        The sum in nats, in fp32 or wider, and the count. Without any label the sum is 0 and still has a graph.
    """
    if vocabulary is not None and vocabulary.parallel.size > 1:
        ignored = labels.flatten() == IGNORED_LABEL
        losses = vocabulary_cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.flatten().masked_fill(ignored, 0), vocabulary
        )
        return losses.masked_fill(ignored, 0.0).sum(), (~ignored).sum()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = functional.cross_entropy(
        wide.reshape(-1, wide.shape[-1]), labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total, (labels != IGNORED_LABEL).sum()


def count_labels(labels: Tensor) -> int:
    """Return the number of labels that are not ``IGNORED_LABEL``."""
    return int((labels != IGNORED_LABEL).sum())


class LanguageModelLoss:
    """Cross-entropy of the next word, as the term ``lm``; of GPT, Llama and T5.

    The target is a mapping with ``labels`` ``[b, s]``: at each position the word that is to be predicted there, or
    ``IGNORED_LABEL``.

    Args:
        vocabulary: How tensor-parallel ranks share the words; None where nobody does.

    Attributes:
        fields: of the micro-batch that it takes.
        terms: names of the terms.
        told_right: None: it counts no right answers.
    """

    fields: ClassVar[tuple[str, ...]] = ("labels",)
    terms: ClassVar[tuple[str, ...]] = ("lm",)
    told_right: ClassVar[str | None] = None

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self.vocabulary = vocabulary

    def __call__(self, output: Tensor, target: Mapping[str, Tensor]) -> dict[str, Term]:
        """Return ``{"lm": (sum, count)}`` for word logits ``[b, s, V]``, or this rank's part of them."""
        return {"lm": cross_entropy_term(output, target["labels"], self.vocabulary)}

    def counts(self, target: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the count of the term."""
        return {"lm": count_labels(target["labels"])}

    def num_right(self, output: Tensor, target: Mapping[str, Tensor]) -> int:  # noqa: ARG002
        """Return 0: a perplexity says more than how many words are told right."""
        return 0
