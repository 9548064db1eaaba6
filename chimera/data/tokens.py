"""A tokenised corpus in three flat arrays.

Knows tokens, where each sentence starts among them, and where each document starts among the sentences. Flat, because
a corpus of millions of sentences as Python lists takes twenty times the memory and a slice of a flat array is what a
sample needs. Refuses to know what the ids mean.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from chimera.data.tokenizer import WordPiece

__all__ = ["TokenArray", "TokenizedDocuments", "tokenize_documents"]

TokenArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedDocuments:
    """Documents of sentences of token ids.

    Attributes:
        tokens: all ids, one after another; uint16 where the vocabulary allows it, else int32.
        sentence_starts: int64 of shape (sentences + 1,): sentence i is ``tokens[sentence_starts[i]:
            sentence_starts[i + 1]]`` and has at least one token.
        document_starts: int64 of shape (documents + 1,): document i has the sentences ``document_starts[i]`` up to
            ``document_starts[i + 1]``; it may have none.
    """

    tokens: TokenArray
    sentence_starts: NDArray[np.int64]
    document_starts: NDArray[np.int64]

    @classmethod
    def from_ids(cls, documents: Iterable[Iterable[Sequence[int]]], *, vocab_size: int) -> Self:
        """Flatten nested lists; sentences without a token are left out."""
        nested = [[sentence for sentence in document if len(sentence)] for document in documents]
        sentences = list(chain.from_iterable(nested))
        dtype: type[np.integer[Any]] = np.uint16 if vocab_size <= 1 << 16 else np.int32
        num_tokens = sum(map(len, sentences))
        return cls(
            np.fromiter(chain.from_iterable(sentences), dtype, count=num_tokens),
            _starts_of([len(sentence) for sentence in sentences]),
            _starts_of([len(document) for document in nested]),
        )

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        """Sentences of all documents."""
        return len(self.sentence_starts) - 1

    def sentence(self, index: int) -> TokenArray:
        """Return the token ids of one sentence, counted over all documents."""
        return self.tokens[self.sentence_starts[index] : self.sentence_starts[index + 1]]

    def select(self, documents: NDArray[np.int64]) -> Self:
        """Return a copy that holds the given documents only, in the given order."""
        first, last = self.document_starts[documents], self.document_starts[documents + 1]
        sentences = _concatenated_ranges(first, last)
        lengths = np.diff(self.sentence_starts)[sentences]
        token_indices = _concatenated_ranges(self.sentence_starts[first], self.sentence_starts[last])
        return type(self)(self.tokens[token_indices], _starts_of(lengths), _starts_of(last - first))


def tokenize_documents(documents: Sequence[Sequence[str]], tokenizer: WordPiece) -> tuple[TokenizedDocuments, int]:
    """Tokenise a corpus.

    Returns:
        The documents, and the number of sentences that gave no token (control characters alone, for instance) and
        are therefore not in them.
    """
    encoded = tokenizer.encode(list(chain.from_iterable(documents)))
    bounds = _starts_of([len(document) for document in documents]).tolist()
    nested = [encoded[first:last] for first, last in pairwise(bounds)]
    num_empty = sum(not sentence for sentence in encoded)
    return TokenizedDocuments.from_ids(nested, vocab_size=tokenizer.vocabulary.size), num_empty


def _starts_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each piece starts, and the end of the last: [3, 1] gives [0, 3, 4]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _concatenated_ranges(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """The integers of range(first[0], last[0]), then those of range(first[1], last[1]), and so on."""
    starts = _starts_of(last - first)
    return np.arange(starts[-1], dtype=np.int64) + np.repeat(first - starts[:-1], last - first)
