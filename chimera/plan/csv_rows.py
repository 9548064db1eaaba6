"""Tables of numbers from CSV files of other people, row by row, each with the line it stands in.

Columns are found by their names, wherever they stand; others are left alone. A file that is not whole is refused with
the line at fault. What the numbers mean is the caller's business.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chimera.errors import FormatError
from chimera.ir.files import read_text, shown

__all__ = ["Row", "read_rows"]

_LARGEST: Final = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        where: file and line, as messages say it.
        fields: text by column.
    """

    where: str
    fields: Mapping[str, str]

    def count(self, column: str) -> int:
        """Return a whole number from 1.

        Raises:
            FormatError: it is none.
        """
        value = self.number(column)
        if value != int(value) or value < 1:
            raise FormatError(f"{self.where}: {column} is {shown(self.fields[column])}; needed: a whole number from 1")
        return int(value)

    def number(self, column: str) -> float:
        """Return a number above 0 that a size or a time can be: no more than 10⁹, no less than 10⁻⁹.

        Raises:
            FormatError: it is none.
        """
        text = self.fields[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 1 / _LARGEST <= value <= _LARGEST:
            raise FormatError(f"{self.where}: {column} is {shown(text)}; needed: a number from 1e-9 to 1e9")
        return value


def read_rows(path: str | Path, columns: Sequence[str], what: str) -> list[Row]:
    """Read a table; ``what`` it is of is said in messages.

    Raises:
        FormatError: the file cannot be read, lacks a column, names one twice, has a line with more or fewer fields, or
            has no line.
    """
    reader = csv.reader(io.StringIO(read_text(path, what), newline=""), strict=True)
    needed = f"needed: columns {', '.join(columns)}"
    rows: list[Row] = []
    header: list[str] = []
    try:
        for fields in reader:
            where = f"{path}, line {reader.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if not header:
                header = _header([field.strip() for field in fields], columns, f"{path}", needed)
                continue
            if len(fields) != len(header):
                raise FormatError(f"{where}: has {len(fields)} fields; needed: {len(header)}, one for each column")
            rows.append(Row(where, dict(zip(header, (field.strip() for field in fields), strict=True))))
    except csv.Error as error:
        raise FormatError(f"{path}, line {reader.line_num}: cannot be read as a {what}: {error}") from error
    if not rows:
        raise FormatError(f"{path}: holds no row; {needed}")
    return rows


def _header(names: list[str], columns: Sequence[str], where: str, needed: str) -> list[str]:
    if missing := [name for name in columns if name not in names]:
        raise FormatError(f"{where}: lacks {', '.join(missing)}; {needed}")
    if twice := sorted({name for name in columns if names.count(name) > 1}):
        raise FormatError(f"{where}: has {', '.join(twice)} twice; needed: each column once")
    return names
