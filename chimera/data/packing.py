"""Documents joined end to end in a random order and cut into pieces of equal length.

Knows the two arrays of such an epoch: the order of its documents, and the document and place at which each piece
begins. Both are made in one pass of compiled code and kept as memory maps; numbers are 64 bits wide where 32 do not do.
A piece is found without searching. Refuses to know what a piece is for.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.index_cache import Arrays, Inputs, kept_arrays
from chimera.data.keyed import NUM_ROUNDS, Purpose, keyed_stream, permuted
from chimera.data.tokens import TokenArray, TokenizedDocuments
from chimera.errors import DataError

__all__ = ["PackedPieces", "pack", "shuffled"]

_VERSION: Final = 1
_NARROW: Final = 1 << 31

_Compiled = Callable[..., Any]


class PackedPieces:
    """An endless sequence of pieces; ``len`` of them are an epoch, which meets each document once.

    The documents of an epoch are shuffled, joined and cut into pieces; the pieces are then shuffled themselves. A piece
    may span several documents, and a document several pieces. The tokens behind the last whole piece, fewer than its
    length, are in no sample of that epoch; they are others in the next.

    Args:
        documents: the corpus.
        length: tokens of a piece.
        overlap: tokens that a piece shares with the next one in the joined text: 1 where a piece holds the next token
            of each position.
        seed: of the orders.
        identity: what the documents are a function of; None keeps no files.
        cache_dir: where the orders are kept.

    Raises:
        DataError: the corpus is shorter than a piece.
    """

    __slots__ = (
        "_cache_dir",
        "_ends",
        "_epoch",
        "_identity",
        "_seed",
        "_starts",
        "_step",
        "length",
        "num_pieces",
        "tokens",
    )

    def __init__(
        self,
        documents: TokenizedDocuments,
        *,
        length: int,
        overlap: int,
        seed: int,
        identity: Inputs | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self.tokens = documents.tokens
        self.length = length
        self._step = length - overlap
        self._seed = seed
        self._identity = identity
        self._cache_dir = cache_dir
        bounds = kept_arrays(cache_dir, "bounds", identity, {"bounds_version": 1}, lambda: _bounds_of(documents))
        self._starts, self._ends = bounds["starts"], bounds["ends"]
        num_tokens = documents.num_tokens
        self.num_pieces = (num_tokens - overlap) // self._step if num_tokens > overlap else 0
        self._epoch: tuple[int, NDArray[Any], NDArray[Any], list[int]] | None = None
        if not self.num_pieces:
            raise DataError(
                f"the documents have {num_tokens} tokens in all, a sample takes {length}; set a shorter "
                "data.sequence_length, or use a larger corpus"
            )

    def __len__(self) -> int:
        """Pieces of one epoch."""
        return self.num_pieces

    def __getitem__(self, index: int) -> TokenArray:
        """Return the tokens of a piece, 0 or more and without an upper end."""
        epoch, position = divmod(index, self.num_pieces)
        order, places, keys = self._epoch_of(epoch)
        place, offset = (int(number) for number in places[permuted(position, self.num_pieces, keys)])
        parts: list[TokenArray] = []
        missing = self.length
        while missing:
            document = order[place]
            start = int(self._starts[document]) + offset
            part = self.tokens[start : min(start + missing, int(self._ends[document]))]
            parts.append(part)
            missing -= len(part)
            place, offset = place + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _epoch_of(self, epoch: int) -> tuple[NDArray[Any], NDArray[Any], list[int]]:
        """The arrays of an epoch, and the keys of its pieces' order."""
        if self._epoch is None or self._epoch[0] != epoch:
            options: Inputs = {
                "packing_version": _VERSION,
                "seed": self._seed,
                "epoch": epoch,
                "length": self.length,
                "step": self._step,
            }
            arrays = kept_arrays(self._cache_dir, "packing", self._identity, options, lambda: self._make(epoch))
            keys = keyed_stream(self._seed, epoch, Purpose.ORDER).random_raw(NUM_ROUNDS).tolist()
            self._epoch = (epoch, arrays["order"], arrays["places"], keys)
        return self._epoch[1:]

    def _make(self, epoch: int) -> Arrays:
        key = int(keyed_stream(self._seed, epoch, Purpose.DOCUMENTS).random_raw())
        order = shuffled(len(self._starts), key)
        return {"order": order, "places": pack(self._ends - self._starts, order, self.num_pieces, self._step)}


def _bounds_of(documents: TokenizedDocuments) -> Arrays:
    starts, ends = documents.document_bounds()
    return {"starts": starts, "ends": ends}


def shuffled(size: int, key: int) -> NDArray[Any]:
    """Return ``range(size)`` in a random order that is a function of the key, of 64 bits."""
    order = np.arange(size, dtype=np.int32 if size < _NARROW else np.int64)
    _compiled()[0](order, np.uint64(key))
    return order


def pack(lengths: NDArray[np.int64], order: NDArray[Any], num_pieces: int, step: int) -> NDArray[Any]:
    """Return where each piece begins: (place in the order, tokens into that document), of shape (pieces, 2)."""
    assert num_pieces * step <= int(lengths.sum()), "there is text for every piece"
    wide = len(lengths) >= _NARROW or int(lengths.max()) >= _NARROW
    places = np.empty((num_pieces, 2), np.int64 if wide else np.int32)
    _compiled()[1](lengths, order, step, places)
    return places


@cache
def _compiled() -> tuple[_Compiled, _Compiled]:
    """The two loops, compiled on first use and then kept by numba on disk."""
    from chimera.data.packing_loops import fill_places, shuffle

    return shuffle, fill_places
