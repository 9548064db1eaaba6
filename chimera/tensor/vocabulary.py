"""A vocabulary divided over tensor-parallel ranks: word embeddings, and the cross-entropy of divided logits.

Each rank holds consecutive words, as many as any other; what is beyond the last word is padding, whose weights are 0,
which no word looks up, and which enters no softmax. The cross-entropy exchanges three numbers per position, never the
logits (Shoeybi et al. 2019, section 3). Knows no architecture and no label that means "none".
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from chimera.tensor.linear import DefersWeights
from chimera.tensor.lookup import looked_up
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.regions import reduce_from_tensor_region, reduce_scatter_to_sequence_region
from chimera.tensor.sharding import Segment, Sharding, mark

__all__ = ["Vocabulary", "VocabularyEmbedding", "padded_vocabulary_size", "vocabulary_cross_entropy"]

_MULTIPLE = 128
"""Rows per rank are a multiple of this many, which matrix products on accelerators are fast with."""


def padded_vocabulary_size(num_words: int, size: int) -> int:
    """Return the number of rows over ``size`` ranks, Megatron's multiple of 128 · t.

    >>> [padded_vocabulary_size(50257, size) for size in (1, 2, 8)]
    [50304, 50432, 51200]
    """
    multiple = _MULTIPLE * size
    return -(-num_words // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which words are this rank's.

    On a rank of its own nothing is padded, so that a model has the parameters its authors counted.

    Attributes:
        num_words: of the whole vocabulary.
        parallel: the ranks that share it.
    """

    num_words: int
    parallel: TensorParallel = ALONE

    @property
    def rows(self) -> int:
        """Rows on each rank, padding included."""
        if self.parallel.size == 1:
            return self.num_words
        return padded_vocabulary_size(self.num_words, self.parallel.size) // self.parallel.size

    @property
    def first(self) -> int:
        """The number of this rank's first word."""
        return self.parallel.rank * self.rows

    @property
    def num_words_here(self) -> int:
        """This rank's words: its rows without padding."""
        return min(max(self.num_words - self.first, 0), self.rows)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """How a parameter with one row per word is cut."""
        return (Segment(self.num_words, self.rows),)


class VocabularyEmbedding(nn.Embedding, DefersWeights):
    """Word embeddings, each rank's part of the words.

    Args:
        vocabulary: which words are here.
        width: of an embedding.
    """

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        super().__init__(vocabulary.rows, width)
        self.vocabulary = vocabulary
        mark(self.weight, Sharding.cut(0, vocabulary.segments, vocabulary.parallel))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Embedding names it
        """Embed ``[b, s]`` word numbers, the same on every rank.

        Returns:
            ``[b, s, width]``, or this rank's part ``[b, s/t, width]`` where the sequence is divided.

        Raises:
            IndexError: a number that is no word (on the CPU; a failed assertion of the device on others).
        """
        parallel = self.vocabulary.parallel
        if parallel.size == 1:
            return looked_up(input, self.weight, self.products)
        elsewhere, local = self._local(input)
        summand = looked_up(local, self.weight, self.products).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if parallel.divides_sequence:
            return reduce_scatter_to_sequence_region(summand, parallel)
        return reduce_from_tensor_region(summand, parallel)

    def _local(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return which words are on other ranks, and the rows of those that are here, 0 for the others.

        What is no word at all belongs to the first rank or the last one, which refuses it.
        """
        vocabulary = self.vocabulary
        local = words - vocabulary.first
        elsewhere = torch.zeros_like(words, dtype=torch.bool)
        if vocabulary.parallel.rank > 0:
            elsewhere |= local < 0
        if vocabulary.parallel.rank < vocabulary.parallel.size - 1:
            elsewhere |= local >= vocabulary.rows
        # The last rank's padding is no word either.
        local = torch.where((words >= vocabulary.num_words) & ~elsewhere, vocabulary.rows, local)
        return elsewhere, local.masked_fill(elsewhere, 0)


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the cross-entropy of each position, in nats, equal on all ranks.

    Args:
        logits: ``[n, rows]``, this rank's part.
        labels: ``[n]``, numbers of words in the whole vocabulary.
        vocabulary: how it is divided.

    Returns:
        ``[n]``, in fp32 or wider.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary.parallel.size == 1:
        return functional.cross_entropy(wide, labels, reduction="none")
    losses: Tensor = _divided_cross_entropy(wide, labels, vocabulary)
    return losses


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _divided_cross_entropy(logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Any:
    return _CrossEntropy.apply(logits, labels, vocabulary)  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
        parallel = vocabulary.parallel
        words = logits[:, : vocabulary.num_words_here]
        largest = words.amax(-1) if words.shape[1] else logits.new_full(labels.shape, -torch.inf)
        largest = parallel.start_maximum(largest).wait()
        local = labels - vocabulary.first
        here = (local >= 0) & (local < vocabulary.num_words_here)
        column = local.masked_fill(~here, 0).unsqueeze(-1)
        shifted = logits - largest.unsqueeze(-1)
        of_label = shifted.gather(-1, column).squeeze(-1).masked_fill(~here, 0.0)
        weights = shifted.exp_()
        weights[:, vocabulary.num_words_here :] = 0.0
        total, of_label = parallel.start_sum(torch.stack((weights.sum(-1), of_label)), into=True).wait()
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), here, column)
        losses: Tensor = total.log() - of_label
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, here, column = ctx.saved_tensors
        gradient = gradient.unsqueeze(-1)
        of_logits = probabilities * gradient
        of_logits.scatter_add_(-1, column, -gradient * here.unsqueeze(-1))
        return of_logits, None, None
