"""How hard the text is when only word frequencies are known.

Knows one distribution: each word piece's share of the training corpus, special tokens left out, which is what the
masked-language-model loss would reach by ignoring the context altogether. A model has learned to use the context by as
many nats as its loss lies below. Refuses to know about models and samples.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.text_tokenizer import Ids
from chimera.data.tokens import TokenArray, TokenizedDocuments
from chimera.errors import DataError

__all__ = ["token_counts", "unigram_cross_entropy", "unigram_entropy"]

_BLOCK_TOKENS: Final = 1 << 20


def token_counts(documents: TokenizedDocuments, vocabulary: Ids) -> NDArray[np.int64]:
    """Return how often each id of the vocabulary occurs; special ones count as never.

    Raises:
        DataError: an id that the vocabulary does not have.
    """
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    for block in _joined(documents.token_blocks()):
        found = np.bincount(block, minlength=vocabulary.size)
        if len(found) > vocabulary.size:
            raise DataError(
                f"there is a token {len(found) - 1}, and the vocabulary has {vocabulary.size}; set data.vocabulary to "
                "the one that the tokens were made with"
            )
        counts += found
    counts[list(vocabulary.special)] = 0
    return counts


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Return H = −Σ p(w) ln p(w) in nats per token, p(w) being the word piece w's share of the maskable tokens.

    This is the number quoted as a corpus's unigram entropy, of its training documents. Masked positions are chosen
    uniformly, so their targets have this distribution.
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_cross_entropy(train: NDArray[np.int64], heldout: NDArray[np.int64], vocabulary: Ids) -> float:
    """Return −Σ q(w) ln p(w) in nats per token: the held-out loss of a model that knows the training frequencies only.

    q is the held-out share; p the training share with one added to the count of every ordinary word piece, since a
    held-out word may be missing in the training documents.
    """
    ordinary = np.ones(vocabulary.size, dtype=bool)
    ordinary[list(vocabulary.special)] = False
    smoothed = train[ordinary] + 1
    return float(-(heldout[ordinary] / heldout.sum() * np.log(smoothed / smoothed.sum())).sum())


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
