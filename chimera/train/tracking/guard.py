"""A tracker that may fail without ending the run, and wait without stopping it.

What it did not take is counted, its first failure is kept, and neither is repeated for every row. A tracker that may
wait for somebody has a thread of its own, which opens it, hands it what has come together, and closes it.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from chimera.train.tracking.masking import Masker
from chimera.train.tracking.record import RunRecord, TrackerRecord
from chimera.train.tracking.tracker import Row, Tracker

__all__ = ["Guarded", "InBackground"]

_TOGETHER_S: Final = 5.0
"""How long rows are collected before they are handed over: a request costs the same for one as for many."""
_MOST_WAITING: Final = 10_000


class Guarded:
    """Drives a tracker at once, in the caller's thread.

    Args:
        tracker: not open.
        masker: keeps secrets out of what is said of a failure.
    """

    def __init__(self, tracker: Tracker, masker: Masker) -> None:
        self.name = tracker.name
        self._tracker = tracker
        self._masker = masker
        self._lock = threading.Lock()
        self._reference: str | None = None
        self._lost = 0
        self._failure: str | None = None

    @property
    def outcome(self) -> TrackerRecord:
        """What became of it so far."""
        with self._lock:
            return TrackerRecord(reference=self._reference, lost_rows=self._lost, first_failure=self._failure)

    def open(self, record: RunRecord) -> None:
        """Open it.

        Raises:
            Exception: what the tracker raises: what cannot even begin is better known before the first step.
        """
        self._reference = self._tracker.open(record)

    def add(self, row: Row) -> None:
        """Hand a row over, or count it as lost."""
        self._hand_over([row])

    def close(self, record: RunRecord, *, within_s: float) -> None:  # noqa: ARG002 - for those that may wait
        """Close it, and wait so long for what is under way."""
        self._tried("closing", lambda: self._tracker.close(record))

    def _hand_over(self, rows: Sequence[Row]) -> None:
        if rows and not self._tried(f"step {rows[0].step}", lambda: self._tracker.add(rows)):
            self._lose(len(rows))

    def _tried(self, at: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the run goes on
            self._fail(at, f"{type(error).__name__}: {error}")
            return False
        return True

    def _fail(self, at: str, text: str) -> None:
        first = next((line.strip() for line in text.splitlines() if line.strip()), text)
        with self._lock:
            self._failure = self._failure or self._masker.text(f"{at}: {first}")

    def _lose(self, rows: int) -> None:
        with self._lock:
            self._lost += rows


class InBackground(Guarded):
    """Drives a tracker in a thread of its own, which nothing waits for before the end of the run."""

    def __init__(self, tracker: Tracker, masker: Masker, *, together_s: float = _TOGETHER_S) -> None:
        super().__init__(tracker, masker)
        self._together_s = together_s
        # Of rows, and at the end the record to close with.
        self._waiting: queue.Queue[Row | RunRecord] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._done = 0
        self._given = 0

    def open(self, record: RunRecord) -> None:
        """Have the thread open it; a failure is told like one of a row."""
        # A daemon: a library that waits for a server for ever must not keep a finished run from ending.
        self._thread = threading.Thread(target=self._run, args=(record,), name=f"chimera-{self.name}", daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Put a row where the thread finds it; never waits."""
        try:
            self._waiting.put_nowait(row)
            self._given += 1
        except queue.Full:
            self._fail(f"step {row.step}", f"{_MOST_WAITING} rows were waiting already, so no more were taken")
            self._lose(1)

    def close(self, record: RunRecord, *, within_s: float) -> None:
        """Wait, so long, until all is handed over and closed."""
        assert self._thread is not None, "opened before"
        until = time.monotonic() + within_s
        try:
            self._waiting.put(record, timeout=within_s)
            self._thread.join(max(0.0, until - time.monotonic()))
        except queue.Full:
            pass  # its thread is alive, and said to be below
        if self._thread.is_alive():
            self._fail("closing", f"it was not done within {within_s:g} s")
            self._lose(self._given - self._done)

    def _run(self, record: RunRecord) -> None:
        opened = self._tried("opening", lambda: self._open(record))
        last: RunRecord | None = None
        while last is None:
            rows, last = self._collected()
            if opened:
                self._hand_over(rows)
            else:
                self._lose(len(rows))
            self._done += len(rows)
        if opened:
            self._tried("closing", lambda: self._tracker.close(last))

    def _open(self, record: RunRecord) -> None:
        reference = self._tracker.open(record)
        with self._lock:
            self._reference = reference

    def _collected(self) -> tuple[list[Row], RunRecord | None]:
        """Wait for what comes together in a while, or until the end; return it, and the last record at the end."""
        rows: list[Row] = []
        until: float | None = None
        while until is None or time.monotonic() < until:
            try:
                found = self._waiting.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(found, RunRecord):
                return rows, found
            rows.append(found)
            until = until or time.monotonic() + self._together_s
        return rows, None
