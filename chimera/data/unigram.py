"""How hard the text is when only word frequencies are known.

Knows one distribution: each word piece's share of the training corpus, special tokens left out, which is what the
masked-language-model loss would reach by ignoring the context altogether. A model has learned to use the context by as
many nats as its loss lies below. Refuses to know about models and samples.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.tokenizer import Vocabulary
from chimera.data.tokens import TokenArray, TokenizedDocuments

__all__ = ["unigram_cross_entropy", "unigram_entropy"]

_BLOCK_TOKENS: Final = 1 << 20


def unigram_entropy(documents: TokenizedDocuments, vocabulary: Vocabulary) -> float:
    """Return H = −Σ p(w) ln p(w) in nats per token, p(w) being the word piece w's share of the maskable tokens.

    This is the number quoted as a corpus's unigram entropy, of its training documents. Masked positions are chosen
    uniformly, so their targets have this distribution.
    """
    counts = _counts(documents, vocabulary)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_cross_entropy(train: TokenizedDocuments, heldout: TokenizedDocuments, vocabulary: Vocabulary) -> float:
    """Return −Σ q(w) ln p(w) in nats per token: the held-out loss of a model that knows the training frequencies only.

    q is the held-out share; p the training share with one added to the count of every ordinary word piece, since a
    held-out word may be missing in the training documents.
    """
    ordinary = np.ones(vocabulary.size, dtype=bool)
    ordinary[list(vocabulary.special)] = False
    smoothed = _counts(train, vocabulary)[ordinary] + 1
    heldout_counts = _counts(heldout, vocabulary)[ordinary]
    return float(-(heldout_counts / heldout_counts.sum() * np.log(smoothed / smoothed.sum())).sum())


def _counts(documents: TokenizedDocuments, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """How often each id occurs, special ones never."""
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    for block in _joined(documents.token_blocks()):
        counts += np.bincount(block, minlength=vocabulary.size)
    counts[list(vocabulary.special)] = 0
    return counts


def _joined(blocks: Iterable[TokenArray]) -> Iterator[TokenArray]:
    """Put small blocks together: counting has a price per block, which the vocabulary's size sets."""
    waiting: list[TokenArray] = []
    size = 0
    for block in blocks:
        waiting.append(block)
        size += len(block)
        if size >= _BLOCK_TOKENS:
            yield np.concatenate(waiting)
            waiting, size = [], 0
    if waiting:
        yield np.concatenate(waiting)
