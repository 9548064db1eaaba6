"""Writing an indexed dataset: sequences are appended, and the two files appear when all are there.

Knows how to stay in constant memory: tokens go to the data file at once, lengths and document starts to files beside
it, and the index is put together in blocks at the end. Both files are renamed into place, the index last, so a reader
finds a whole dataset or none. Refuses to know where the tokens come from.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chimera.data.indexed.dataset import IndexedDataset, blocks
from chimera.data.indexed.layout import IndexHeader, data_path, dataset_prefix, index_path
from chimera.errors import DataError, UsageError

__all__ = ["IndexedWriter"]

_LONGEST: Final = (1 << 31) - 1
_COPY_BYTES: Final = 1 << 24


class IndexedWriter:
    """Appends documents to a new dataset; leaving the ``with`` block puts it in place, an error removes all of it.

    Args:
        prefix: common part of the two files' names.
        token_type: of the tokens, see ``token_type_for``.
        overwrite: whether to replace a dataset of that name.

    Raises:
        UsageError: there is one already, or its folder does not exist.
    """

    def __init__(self, prefix: str | Path, token_type: np.dtype[Any], *, overwrite: bool = False) -> None:
        self.prefix = dataset_prefix(prefix)
        self.token_type = np.dtype(token_type)
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0
        for path in (index_path(self.prefix), data_path(self.prefix)):
            if path.exists() and not overwrite:
                raise UsageError(f"{path} exists; give another name, or --overwrite to replace it")
        if not self.prefix.parent.is_dir():
            raise UsageError(f"{self.prefix.parent} is no folder; make it first, or write elsewhere")
        self._folder = Path(tempfile.mkdtemp(dir=self.prefix.parent, prefix=f".{self.prefix.name}.", suffix=".tmp"))
        self._tokens: IO[bytes] = (self._folder / "tokens").open("wb")
        self._lengths: IO[bytes] = (self._folder / "lengths").open("w+b")
        self._starts: IO[bytes] = (self._folder / "documents").open("w+b")
        self._starts.write(np.zeros(1, "<i8").tobytes())

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the files in place, or remove them after an error."""
        try:
            if kind is None:
                self._finish()
        finally:
            for file in (self._tokens, self._lengths, self._starts):
                file.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, tokens: NDArray[Any], lengths: NDArray[Any], sequences_per_document: NDArray[Any]) -> None:
        """Append documents given flat.

        Args:
            tokens: those of all sequences, one after another.
            lengths: tokens of each sequence; may be 0.
            sequences_per_document: may be 0 as well: an empty document.

        Raises:
            DataError: a sequence is too long for the format.
        """
        assert lengths.sum() == len(tokens), "the lengths are those of the tokens"
        assert sequences_per_document.sum() == len(lengths), "every sequence is in a document"
        if len(lengths) and lengths.max() > _LONGEST:
            raise DataError(
                f"a sequence of {lengths.max():,} tokens: the format holds up to {_LONGEST:,}; cut its document"
            )
        self._tokens.write(tokens.astype(self.token_type, copy=False).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        starts = self.num_sequences + np.cumsum(sequences_per_document, dtype="<i8")
        self._starts.write(starts.tobytes())
        self.num_tokens += len(tokens)
        self.num_sequences += len(lengths)
        self.num_documents += len(sequences_per_document)

    def add_document(self, sequences: Iterable[ArrayLike]) -> None:
        """Append one document of any number of sequences."""
        arrays: Sequence[NDArray[Any]] = [np.asarray(sequence, self.token_type) for sequence in sequences]
        lengths = np.array([len(array) for array in arrays], np.int64)
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.token_type)
        self.add(tokens, lengths, np.array([len(arrays)]))

    def append(self, other: IndexedDataset) -> None:
        """Append a whole dataset of the same type of token, block by block."""
        assert other.tokens.dtype == self.token_type, "the types are equal"
        with data_path(other.prefix).open("rb") as source:
            _copy(source, self._tokens, other.tokens.nbytes)
        for first, last in blocks(len(other)):
            self._lengths.write(other.lengths[first:last].tobytes())
        for first, last in blocks(other.num_documents):
            starts = other.document_starts[first + 1 : last + 1] + self.num_sequences
            self._starts.write(starts.astype("<i8").tobytes())
        self.num_tokens += len(other.tokens)
        self.num_sequences += len(other)
        self.num_documents += other.num_documents

    def _finish(self) -> None:
        with (self._folder / "index").open("wb") as index:
            header = IndexHeader(self.token_type, self.num_sequences, self.num_documents + 1)
            index.write(header.to_bytes())
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, index, _COPY_BYTES)
            self._write_offsets(index)
            self._starts.seek(0)
            shutil.copyfileobj(self._starts, index, _COPY_BYTES)
            for file in (self._tokens, index):
                file.flush()
                os.fsync(file.fileno())
        # An index without its data would be an error for readers; so the old one goes first and the new one comes last.
        index_path(self.prefix).unlink(missing_ok=True)
        (self._folder / "tokens").replace(data_path(self.prefix))
        (self._folder / "index").replace(index_path(self.prefix))

    def _write_offsets(self, index: IO[bytes]) -> None:
        self._lengths.seek(0)
        end = 0
        for first, last in blocks(self.num_sequences):
            some = np.frombuffer(self._lengths.read(4 * (last - first)), "<i4").astype(np.int64)
            ends = end + np.cumsum(some) * self.token_type.itemsize
            index.write((ends - some * self.token_type.itemsize).astype("<i8").tobytes())
            end = int(ends[-1])


def _copy(source: IO[bytes], target: IO[bytes], num_bytes: int) -> None:
    """Copy the first bytes of a file."""
    while num_bytes:
        block = source.read(min(num_bytes, _COPY_BYTES))
        assert block, "a dataset that was opened has all its bytes"
        target.write(block)
        num_bytes -= len(block)
