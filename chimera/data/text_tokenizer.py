"""Any tokenizer of the ``tokenizers`` library, as sentences to ids and back.

Knows that text is never cut, padded or framed here, and that text which looks like a special token is ordinary text, so
that no special id comes out of a sentence except the one of unknown words. Refuses to know what an id is for.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from chimera.errors import DataError, nearest_names

__all__ = ["Ids", "TextTokenizer"]

# What the library returns holds far more than ids, so larger batches are slower: they fall out of the caches.
_BATCH: Final = 1000


class Ids(Protocol):
    """What counting needs to know of a vocabulary."""

    @property
    def size(self) -> int:
        """Rows that a word embedding needs."""

    @property
    def special(self) -> tuple[int, ...]:
        """Ids that stand for no text, ascending."""


class TextTokenizer:
    """Takes over a tokenizer of the library.

    Attributes:
        name: where it comes from, for messages.
        size: rows that a word embedding needs: the highest id and one.
    """

    __slots__ = ("_tokenizer", "name", "size")

    name: str
    size: int

    def __init__(self, tokenizer: Tokenizer, *, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        # A tokenizer.json may ask for cutting and padding; sentences stay whole here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True

    @classmethod
    def from_json(cls, text: str, *, name: str = "tokenizer.json") -> Self:
        """Make a tokenizer from the text of a tokenizer.json.

        Raises:
            DataError: it is not one, or it lacks what the class needs.
        """
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"vocabulary {name} is not a tokenizer.json ({error}); set data.vocabulary to one, or to a vocab.txt"
            ) from error
        return cls(tokenizer, name=name)

    def to_json(self) -> str:
        """Return the text of its tokenizer.json, which ``from_json`` reads back."""
        return str(self._tokenizer.to_str())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each sentence, without any frame; a sentence may have none."""
        ids: list[list[int]] = []
        for first in range(0, len(sentences), _BATCH):
            some = list(sentences[first : first + _BATCH])
            encodings = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            ids += [encoding.ids for encoding in encodings]
        return ids

    def encode_flat(self, sentences: Sequence[str], dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ids of all sentences, one after another, and how many each has."""
        ids = self.encode(sentences)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), dtype, int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    def tokens(self) -> dict[str, int]:
        """Return the id of every token."""
        return dict(self._tokenizer.get_vocab())

    @property
    def special(self) -> tuple[int, ...]:
        """Ids that stand for no text, ascending: special tokens, and ids without a token."""
        marked = {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return tuple(sorted(marked | (set(range(self.size)) - set(self.tokens().values()))))

    def id_of(self, token: str) -> int:
        """Return the id of a token.

        Raises:
            DataError: there is none such.
        """
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise DataError(f"vocabulary {self.name} has no token {token!r}{nearest_names(token, self.tokens())}")
        return int(number)
