"""Exports of NVIDIA Nsight Systems (SQLite): annotated ranges, and the device's work that was launched inside each.

A kernel belongs to a range if the call that launched it, which has the same correlation, starts within the range on the
range's own thread; concurrent ranges of other threads take nothing from one another. A range's time is from the start
of its first kernel to the end of its last. What the ranges are called, and what that makes of them, is
``timeline.nsys_steps``' business. Files are opened for reading only, and names are bound, never pasted, into queries.
"""

import sqlite3
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from chimera.errors import FormatError

__all__ = ["NsysExport", "Range", "read_nsys"]

_RANGES: Final = "NVTX_EVENTS"
_CALLS: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
_WORK: Final = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
"""Tables of what the device does; each is there only if something of its kind occurred."""
_WAITS: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_VERSIONS: Final = ("", "_V3", "_V2")
"""Suffixes that exporters have put behind a table's name."""
_PUSH_POP: Final = 59
_THREAD_BITS: Final = 24
"""Low bits of a global thread's number that tell threads of one process apart."""
_REMEDY: Final = "record with 'chimera profile CONFIG --nsys', or nsys profile -t cuda,nvtx around annotated code"


class Range(NamedTuple):
    """An annotated range: its name, its thread, when it was open on the host and when its work ran on the device.

    Times are nanoseconds on the file's clock; ``work`` is None where nothing was launched inside.
    """

    name: str
    thread: int
    start: int
    end: int
    work: tuple[int, int] | None

    @property
    def process(self) -> int:
        """The process of the thread."""
        return self.thread >> _THREAD_BITS


@dataclass(frozen=True, slots=True)
class NsysExport:
    """What one file holds.

    Attributes:
        path: of the file.
        ranges: in order of their starts.
        device_s: seconds of device activity, and of waits for it, by the kind of activity.
    """

    path: Path
    ranges: tuple[Range, ...]
    device_s: Mapping[str, float]


def read_nsys(path: str | Path, *, any_thread: bool = False) -> NsysExport:
    """Read one export.

    Args:
        path: of a file that ``nsys export --type sqlite`` made.
        any_thread: whether launches of other threads of a range's process count too. Torch runs backwards on a thread
            of its own unless told otherwise, as ``chimera profile`` tells it.

    Raises:
        FormatError: the file is no such export, or has no annotations or no CUDA activity.
    """
    path = Path(path)
    if not path.is_file():
        raise FormatError(f"{path}: there is no such file; needed: an export of nsys in SQLite form")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as database:
            return _read(database, path, any_thread=any_thread)
    except sqlite3.DatabaseError as error:
        raise FormatError(
            f"{path} cannot be read as SQLite: {error}; needed: the file that 'nsys export --type sqlite' makes of a "
            ".nsys-rep"
        ) from error


def _read(database: sqlite3.Connection, path: Path, *, any_thread: bool) -> NsysExport:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    found = {name: _table(name, tables) for name in (_RANGES, _CALLS, *_WORK, _WAITS)}
    if found[_RANGES] is None:
        raise FormatError(f"{path} has no table {_RANGES}: nothing was annotated; {_REMEDY}")
    calls, work = found[_CALLS], {name: table for name in _WORK if (table := found[name]) is not None}
    if calls is None or not work:
        raise FormatError(f"{path} has no CUDA activity ({_CALLS} and {_WORK[0]}); {_REMEDY}")
    launched = _Launches(
        _rows(database, path, calls, ("start", "correlationId", "globalTid")),
        {
            table: _rows(database, path, table, ("start", "end", "correlationId"), optional="globalPid")
            for table in work.values()
        },
        any_thread=any_thread,
    )
    ranges = tuple(
        Range(name, thread, start, end, launched.within(thread, start, end))
        for start, end, name, thread in _ranges(database, path, found[_RANGES] or "", "StringIds" in tables)
    )
    if not ranges:
        raise FormatError(f"{path} has annotations, but no range among them; {_REMEDY}")
    timed = work | ({_WAITS: found[_WAITS]} if found[_WAITS] else {})
    return NsysExport(
        path, ranges, {_kind(name): _total_s(database, path, table) for name, table in timed.items() if table}
    )


def _table(name: str, tables: set[str]) -> str | None:
    return next((name + version for version in _VERSIONS if name + version in tables), None)


def _kind(table: str) -> str:
    return table.rpartition("_KIND_")[2].lower()


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,))}


def _rows(
    database: sqlite3.Connection, path: Path, table: str, columns: Sequence[str], optional: str | None = None
) -> list[tuple[int, ...]]:
    """Return columns of a table; the optional one is None in every row where there is no such column."""
    have = _columns(database, table)
    _require(path, table, columns, have)
    chosen = [f'"{column}"' for column in columns]
    if optional is not None:
        chosen.append(f'"{optional}"' if optional in have else "NULL")
    # Table and column names come from this module and the file's own list; values are never pasted.
    return list(database.execute(f'SELECT {", ".join(chosen)} FROM "{table}"'))  # noqa: S608


def _require(path: Path, table: str, columns: Sequence[str], have: set[str]) -> None:
    if missing := [column for column in columns if column not in have]:
        raise FormatError(
            f"{path}: table {table} has no column {', '.join(missing)}; it has: {', '.join(sorted(have))}; needed: an "
            "export of nsys"
        )


def _ranges(
    database: sqlite3.Connection,
    path: Path,
    table: str,
    has_strings: bool,  # noqa: FBT001
) -> Iterator[tuple[int, int, str, int]]:
    """Yield (start, end, name, thread) of the ranges, without marks and rows of domains, which have no end."""
    have = _columns(database, table)
    _require(path, table, ("start", "end", "globalTid"), have)
    if not {"text", "textId"} & have:
        raise FormatError(f"{path}: table {table} has neither text nor textId; needed: an export of nsys")
    name, join = ("n.text" if "text" in have else "NULL"), ""
    if "textId" in have and has_strings:
        # A registered string stands in another table.
        name, join = f"COALESCE({name}, s.value)", "LEFT JOIN StringIds AS s ON s.id = n.textId"
    of_type = "AND n.eventType = ?" if "eventType" in have else ""
    query = (
        f'SELECT n.start, n."end", {name}, n.globalTid FROM "{table}" AS n {join} '  # noqa: S608 - as above
        f'WHERE n."end" IS NOT NULL AND n."end" > n.start {of_type} ORDER BY n.start, n."end" DESC'
    )
    for start, end, text, thread in database.execute(query, (_PUSH_POP,) if of_type else ()):
        if text is not None and thread is not None:
            yield start, end, text, thread


def _total_s(database: sqlite3.Connection, path: Path, table: str) -> float:
    return sum(end - start for start, end in _rows(database, path, table, ("start", "end"))) / 1e9


class _Launches:
    """The launching calls of each thread in order of time, and what each started on the device."""

    def __init__(
        self, calls: Sequence[tuple[int, ...]], work: Mapping[str, Sequence[tuple[int, ...]]], *, any_thread: bool
    ) -> None:
        self._shift = _THREAD_BITS if any_thread else 0
        # Correlations number the calls of one process; older exports do not say whose a kernel is.
        self._work: defaultdict[tuple[int | None, int], list[tuple[int, int]]] = defaultdict(list)
        for rows in work.values():
            for start, end, correlation, process in rows:
                self._work[None if process is None else process >> _THREAD_BITS, correlation].append((start, end))
        by_thread: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for start, correlation, thread in calls:
            if thread is not None:
                by_thread[thread >> self._shift].append((start, correlation, thread >> _THREAD_BITS))
        self._calls = {thread: sorted(found) for thread, found in by_thread.items()}

    def within(self, thread: int, start: int, end: int) -> tuple[int, int] | None:
        """Return the first start and the last end of what calls in a range started."""
        calls = self._calls.get(thread >> self._shift, [])
        first, last = bisect_left(calls, (start,)), bisect_right(calls, (end, float("inf"), 0))
        spans = [
            span
            for _, correlation, process in calls[first:last]
            for key in ((process, correlation), (None, correlation))
            for span in self._work.get(key, ())
        ]
        return (min(s for s, _ in spans), max(e for _, e in spans)) if spans else None
