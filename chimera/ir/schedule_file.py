"""Schedule files: which form a file has, reading it within bounds, writing it whole or not at all.

The forms themselves are ``json_form``, ``csv_form`` and ``text_form``. Reading judges the form alone; whoever uses the
schedule proves it.
"""

from pathlib import Path
from typing import Final, Literal

from chimera.errors import FormatError, UsageError
from chimera.ir.csv_form import from_csv, to_csv
from chimera.ir.files import read_text, replacing
from chimera.ir.json_form import from_json, to_json
from chimera.ir.schedule import Schedule
from chimera.ir.text_form import from_text, to_text

__all__ = ["FileFormat", "format_schedule", "read_schedule", "write_schedule"]

FileFormat = Literal["json", "csv", "text"]

_SUFFIXES: Final[dict[str, FileFormat]] = {".json": "json", ".csv": "csv", ".txt": "text"}


def read_schedule(path: str | Path, *, format: FileFormat | None = None) -> tuple[Schedule, tuple[str, ...]]:  # noqa: A002
    """Read a schedule file; its form is that of its suffix (.json, .csv, .txt) unless given.

    Returns:
        the schedule, not proved yet, and notes on what of the file is not in it.

    Raises:
        FormatError: the file cannot be read or is not what its form says.
    """
    path = Path(path)
    form = _form_of(path) if format is None else format
    text = read_text(path, "schedule file")
    try:
        if form == "json":
            return from_json(text), ()
        if form == "csv":
            return from_csv(text, _name_of(path))
        return from_text(text, _name_of(path)), ()
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def write_schedule(schedule: Schedule, path: str | Path, *, format: FileFormat | None = None) -> None:  # noqa: A002
    """Write a schedule file, in the form of its suffix unless given; readers see the old file or the whole new one.

    Raises:
        FormatError: the form cannot carry the schedule.
        UsageError: the file cannot be written.
    """
    path = Path(path)
    text = format_schedule(schedule, _form_of(path) if format is None else format)
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}; give another --out") from error


def format_schedule(schedule: Schedule, format: FileFormat) -> str:  # noqa: A002
    """Return the text of a schedule file."""
    if format == "json":
        return to_json(schedule)
    return to_csv(schedule) if format == "csv" else to_text(schedule)


def _form_of(path: Path) -> FileFormat:
    form = _SUFFIXES.get(path.suffix.lower())
    if form is None:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in _SUFFIXES.items())
        raise FormatError(f"{path}: the suffix {path.suffix!r} names no form of schedule file; needed: one of {known}")
    return form


def _name_of(path: Path) -> str:
    """Return the file's name without its suffix, for forms that carry no name."""
    return path.stem[:200] if path.stem.isprintable() else "file"
