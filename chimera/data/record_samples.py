"""Samples out of records that somebody else keeps: a table of Hugging Face datasets, or MosaicML's streaming shards.

Knows records by number, each a mapping of names to numbers, and gives them in an order of their own per epoch. Nothing
is made of them: their fields are the samples' fields. Refuses to know whose records they are.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chimera.data.keyed import NUM_ROUNDS, Purpose, keyed_stream, permuted
from chimera.data.samples import Sample
from chimera.errors import DataError, nearest_names

__all__ = ["RecordSamples", "Records", "open_huggingface", "open_streaming"]


class Records(Protocol):
    """Records by number."""

    def __len__(self) -> int:
        """Records in all."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return one."""


class RecordSamples:
    """An endless sequence of samples; ``len`` of them are every record once.

    Args:
        records: where they come from.
        columns: the record's column of each field.
        seed: of the order, 0 or more.
        name: of the records, for messages.

    Raises:
        DataError: no record, or a column that the first one does not have.
    """

    __slots__ = ("_columns", "_epoch", "_name", "_records", "_seed", "_shapes", "fields")

    fields: tuple[str, ...]

    def __init__(self, records: Records, columns: Mapping[str, str], *, seed: int, name: str = "records") -> None:
        self.fields = tuple(columns)
        self._records = records
        self._columns = dict(columns)
        self._seed = seed
        self._name = name
        self._epoch: tuple[int, list[int]] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        if not len(records):
            raise DataError(f"{name} has no record")
        first = self._converted(0, self.fields)
        self._shapes = {field: array.shape for field, array in first.items()}

    def __len__(self) -> int:
        """Records, of which an epoch takes each once."""
        return len(self._records)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample of an index, 0 or more and without an upper end."""
        return self.sample(index, self.fields)

    def sample(self, index: int, fields: Collection[str]) -> Sample:
        """Return these fields of the sample.

        Raises:
            DataError: the record is of another form than the first one.
        """
        if index < 0:
            raise IndexError(f"sample {index}: samples are counted from 0 and have no end to count back from")
        epoch, position = divmod(index, len(self._records))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, keyed_stream(self._seed, epoch, Purpose.ORDER).random_raw(NUM_ROUNDS).tolist())
        number = permuted(position, len(self._records), self._epoch[1])
        made = self._converted(number, fields)
        for field, array in made.items():
            if array.shape != self._shapes[field]:
                raise DataError(
                    f"{self._name}: record {number} has {self._columns[field]!r} of shape {array.shape}, the first one "
                    f"of {self._shapes[field]}; cut or fill the records to one length"
                )
        return made

    def _converted(self, number: int, fields: Collection[str]) -> Sample:
        record = self._records[number]
        return {field: self._numbers(record, field, number) for field in self.fields if field in fields}

    def _numbers(self, record: Mapping[str, Any], field: str, number: int) -> NDArray[np.int64]:
        column = self._columns[field]
        if column not in record:
            raise DataError(
                f"{self._name}: record {number} has no column {column!r}{nearest_names(column, record)}; it has "
                f"{', '.join(record)}"
            )
        array = np.asarray(record[column])
        if not np.issubdtype(array.dtype, np.integer):
            raise DataError(
                f"{self._name}: record {number} has {column!r} of type {array.dtype}; needed: whole numbers"
            )
        return array.astype(np.int64)


def open_huggingface(path: str) -> Records:
    """Open a dataset that ``datasets.Dataset.save_to_disk`` wrote; it stays on disk.

    Raises:
        DataError: the package is missing, or there is no such dataset.
    """
    try:
        from chimera.data.huggingface_records import saved_dataset
    except ImportError:
        raise DataError(f"{path} needs the package datasets; install chimera-pipeline[huggingface]") from None
    return saved_dataset(path)


def open_streaming(path: str, *, cache: str | None = None) -> Records:
    """Open shards that MosaicML's streaming wrote, in a folder or, with a folder ``cache``, at a remote address.

    Raises:
        DataError: the package is missing, or there are no such shards.
    """
    try:
        from chimera.data.streaming_records import streaming_dataset
    except ImportError:
        raise DataError(f"{path} needs the package mosaicml-streaming; install it in this environment") from None
    return streaming_dataset(path, cache)
