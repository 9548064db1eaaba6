"""An indexed dataset, read by memory map.

Knows how sequences and documents are found in it, and proves on opening that index and data agree, in blocks and so in
constant memory. Nothing is copied: sequences are views of the file, and processes that open the same set share its
pages. Refuses to know what tokens mean.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.indexed.layout import data_path, dataset_prefix, index_path, read_header
from chimera.errors import FormatError, UsageError

__all__ = ["IndexedDataset", "blocks"]

_BLOCK: Final = 1 << 20


class IndexedDataset:
    """Sequences of tokens, grouped into documents; ``dataset[i]`` is a view of sequence i.

    Attributes:
        prefix: common part of the two files' names.
        tokens: all tokens of all sequences, in order: a view of the data file.
        lengths: tokens of each sequence, i32[N], a view of the index (as the next two), at unaligned addresses.
        offsets: byte at which each sequence begins, i64[N].
        document_starts: the first sequence of each document, and N: i64[documents + 1].
        modes: a byte per sequence, in multimodal sets only.
        num_spare_bytes: bytes of the data file behind the last sequence, which belong to none.

    Raises:
        UsageError: a file is missing.
        FormatError: the index is none, or contradicts itself or the data file.
    """

    __slots__ = ("document_starts", "lengths", "modes", "num_spare_bytes", "offsets", "prefix", "tokens")

    prefix: Path
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    document_starts: NDArray[np.int64]
    modes: NDArray[np.int8] | None
    num_spare_bytes: int

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = dataset_prefix(prefix)
        path = index_path(self.prefix)
        header = read_header(path)
        index = np.memmap(path, mode="r", dtype=np.uint8)
        count = header.num_sequences
        self.lengths = np.frombuffer(index, "<i4", count, header.lengths_at)
        self.offsets = np.frombuffer(index, "<i8", count, header.offsets_at)
        self.document_starts = np.frombuffer(index, "<i8", header.num_bounds, header.documents_at)
        self.modes = np.frombuffer(index, "i1", count, header.modes_at) if header.has_modes else None
        _check_documents(path, self.document_starts, count)
        num_bytes = _check_sequences(path, self.lengths, self.offsets, header.token_type.itemsize)
        self.tokens, self.num_spare_bytes = _mapped(data_path(self.prefix), header.token_type, num_bytes)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return the tokens of a sequence, counted from 0."""
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"sequence {index} of {self.prefix}: there are {len(self.lengths)}, counted from 0")
        first = int(self.offsets[index]) // self.tokens.itemsize
        return self.tokens[first : first + int(self.lengths[index])]

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_starts) - 1

    def document(self, index: int) -> list[NDArray[Any]]:
        """Return the sequences of a document, counted from 0."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.prefix}: there are {self.num_documents}, counted from 0")
        first, last = (int(bound) for bound in self.document_starts[index : index + 2])
        return [self[sequence] for sequence in range(first, last)]


def blocks(length: int) -> list[tuple[int, int]]:
    """Return the bounds of pieces of ``range(length)`` that are small beside the memory of any machine.

    >>> blocks(2_000_000)
    [(0, 1048576), (1048576, 2000000)]
    """
    return list(pairwise([*range(0, length, _BLOCK), length]))


def _check_documents(path: Path, starts: NDArray[np.int64], num_sequences: int) -> None:
    if starts[0] != 0 or starts[-1] != num_sequences:
        raise FormatError(
            f"{path}: documents run from sequence {starts[0]} to {starts[-1]}; needed: from 0 to {num_sequences}, the "
            "number of sequences; the file is damaged, make it again"
        )
    for first, last in blocks(len(starts)):
        block = starts[first : last + 1]
        backward = np.flatnonzero(block[1:] < block[:-1])
        if len(backward):
            at = first + int(backward[0])
            raise FormatError(
                f"{path}: document {at} starts at sequence {starts[at]} and the next one before it, at "
                f"{starts[at + 1]}; the file is damaged, make it again"
            )


def _check_sequences(path: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], size: int) -> int:
    """Compare offsets with the sums of lengths, and return the bytes of all sequences."""
    expected = 0
    for first, last in blocks(len(lengths)):
        some = lengths[first:last].astype(np.int64)
        if some.min() < 0:
            at = int(np.flatnonzero(some < 0)[0])
            raise FormatError(f"{path}: sequence {first + at} has the length {some[at]}; the file is damaged")
        ends = expected + np.cumsum(some * size)
        starts = ends - some * size
        wrong = np.flatnonzero(offsets[first:last] != starts)
        if len(wrong):
            at = int(wrong[0])
            raise FormatError(
                f"{path}: sequence {first + at} begins at byte {offsets[first + at]}, the lengths before it end at "
                f"byte {starts[at]}; offsets and lengths contradict each other, make the set again"
            )
        expected = int(ends[-1])
    return expected


def _mapped(path: Path, token_type: np.dtype[Any], num_bytes: int) -> tuple[NDArray[Any], int]:
    """Map the tokens, and count the bytes behind them."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist beside its index; copy both files") from None
    if size < num_bytes:
        raise FormatError(
            f"{path} has {size:,} bytes, the lengths in its index take {num_bytes:,}; it is cut short, or belongs to "
            "another index: copy both files again"
        )
    if not num_bytes:
        return np.empty(0, token_type), size
    # A plain array over the map: subclass bookkeeping would cost more than a small read.
    mapped = np.memmap(path, mode="r", dtype=np.uint8)
    return np.frombuffer(mapped, token_type, num_bytes // token_type.itemsize), size - num_bytes
