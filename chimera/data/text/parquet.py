"""A text column of a Parquet file; this module stands for the package ``pyarrow``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import parquet

from chimera.errors import DataError, nearest_names

__all__ = ["column_batches"]

_ROWS: Final = 512


def column_batches(path: Path, column: str) -> Iterator[tuple[tuple[str | None, ...], float]]:
    """Yield the texts of some rows at a time; a missing one is None; and the share of the rows read so far.

    Raises:
        DataError: the file is missing or no Parquet file, or has no such column of text.
    """
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise DataError(
                    f"{path} has no column {column!r}{nearest_names(column, schema.names)}; it has "
                    f"{', '.join(schema.names)}: name one with --field"
                )
            kind = schema.field(column).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(f"{path}: column {column!r} holds {kind}; needed: text")
            done = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
                done += batch.num_rows
                yield tuple(batch.column(0).to_pylist()), done / file.metadata.num_rows
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is no Parquet file, or damaged or cut short ({error}); copy it again") from error
