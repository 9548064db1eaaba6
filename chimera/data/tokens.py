"""A tokenised corpus in flat arrays.

Knows tokens, where each sentence starts among them, and where each document starts among the sentences. Flat, because
a corpus of millions of sentences as Python lists takes twenty times the memory and a slice of a flat array is what a
sample needs. Refuses to know what the ids mean.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from chimera.data.text_tokenizer import TextTokenizer

__all__ = ["TokenArray", "TokenizedDocuments", "starts_of", "tokenize_documents"]

_BLOCK_TOKENS: Final = 1 << 20

TokenArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedDocuments:
    """Documents of sentences of token ids.

    The arrays may be memory maps. A selection of documents shares the tokens of the whole, so there may be tokens
    between two documents that belong to neither; within a document the sentences follow one another.

    Attributes:
        tokens: all ids, and possibly others between documents; uint16 where the vocabulary allows it, else int32.
        sentence_starts: int64 of shape (sentences,): where each begins among the tokens, ascending.
        sentence_ends: likewise, where each ends; a sentence has at least one token.
        document_starts: int64 of shape (documents + 1,): document i has the sentences ``document_starts[i]`` up to
            ``document_starts[i + 1]``; it may have none.
    """

    tokens: TokenArray
    sentence_starts: NDArray[np.int64]
    sentence_ends: NDArray[np.int64]
    document_starts: NDArray[np.int64]

    @classmethod
    def contiguous(
        cls, tokens: TokenArray, sentence_bounds: NDArray[np.int64], document_starts: NDArray[np.int64]
    ) -> Self:
        """Take sentences that follow one another without a gap, given by their starts and the last one's end."""
        return cls(tokens, sentence_bounds[:-1], sentence_bounds[1:], document_starts)

    @classmethod
    def from_ids(cls, documents: Iterable[Iterable[Sequence[int]]], *, vocab_size: int) -> Self:
        """Flatten nested lists; sentences without a token are left out."""
        nested = [[sentence for sentence in document if len(sentence)] for document in documents]
        sentences = list(chain.from_iterable(nested))
        dtype: type[np.integer[Any]] = np.uint16 if vocab_size <= 1 << 16 else np.int32
        num_tokens = sum(map(len, sentences))
        return cls.contiguous(
            np.fromiter(chain.from_iterable(sentences), dtype, count=num_tokens),
            starts_of([len(sentence) for sentence in sentences]),
            starts_of([len(document) for document in nested]),
        )

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        """Sentences of all documents."""
        return len(self.sentence_starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sentences."""
        bounds = range(0, self.num_sentences, _BLOCK_TOKENS)
        some = (
            (self.sentence_starts[at : at + _BLOCK_TOKENS], self.sentence_ends[at : at + _BLOCK_TOKENS])
            for at in bounds
        )
        return sum(int((ends - starts).sum()) for starts, ends in some)

    def sentence(self, index: int) -> TokenArray:
        """Return the token ids of one sentence, counted over all documents."""
        return self.tokens[self.sentence_starts[index] : self.sentence_ends[index]]

    def text(self, first: int, end: int) -> TokenArray:
        """Return the token ids of the sentences ``first`` up to ``end``, which are of one document."""
        if first == end:
            return self.tokens[:0]
        return self.tokens[self.sentence_starts[first] : self.sentence_ends[end - 1]]

    def document_bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the documents that have tokens begin and end among the tokens."""
        filled = np.flatnonzero(self.document_starts[1:] > self.document_starts[:-1])
        first, last = self.document_starts[filled], self.document_starts[filled + 1] - 1
        return self.sentence_starts[first], self.sentence_ends[last]

    def token_blocks(self) -> Iterator[TokenArray]:
        """Go through all tokens once, some at a time and without copying."""
        starts, ends = self.document_bounds()
        joins = np.flatnonzero(starts[1:] == ends[:-1]) + 1
        starts, ends = np.delete(starts, joins), np.delete(ends, joins - 1)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            for first in range(start, end, _BLOCK_TOKENS):
                yield self.tokens[first : min(end, first + _BLOCK_TOKENS)]

    def select(self, documents: NDArray[np.int64]) -> Self:
        """Return the given documents, in ascending order; the tokens are shared, not copied."""
        first, last = self.document_starts[documents], self.document_starts[documents + 1]
        sentences = _concatenated_ranges(first, last)
        return type(self)(
            self.tokens, self.sentence_starts[sentences], self.sentence_ends[sentences], starts_of(last - first)
        )


def tokenize_documents(
    documents: Sequence[Sequence[str]], tokenizer: TextTokenizer, end_token: int | None = None
) -> tuple[TokenizedDocuments, int]:
    """Tokenise a corpus; ``end_token`` is appended to the last sentence of each document.

    Returns:
        The documents, and the number of sentences that gave no token (control characters alone, for instance) and
        are therefore not in them.
    """
    encoded = tokenizer.encode(list(chain.from_iterable(documents)))
    bounds = starts_of([len(document) for document in documents]).tolist()
    nested = [encoded[first:last] for first, last in pairwise(bounds)]
    num_empty = sum(not sentence for sentence in encoded)
    if end_token is not None:
        for document in nested:
            if any(document):
                next(sentence for sentence in reversed(document) if sentence).append(end_token)
    return TokenizedDocuments.from_ids(nested, vocab_size=tokenizer.size), num_empty


def starts_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each piece starts, and the end of the last.

    >>> starts_of([3, 1])
    array([0, 3, 4])
    """
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _concatenated_ranges(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """The integers of range(first[0], last[0]), then those of range(first[1], last[1]), and so on."""
    starts = starts_of(last - first)
    return np.arange(starts[-1], dtype=np.int64) + np.repeat(first - starts[:-1], last - first)
