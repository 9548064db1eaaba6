"""How far a long command is, on a terminal: share, rate and time left. Elsewhere a line now and then, on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["byte_progress"]

_LINE_EVERY_S: Final = 30.0


@contextmanager
def byte_progress(activity: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that is told the bytes done and those in all."""
    if not sys.stderr.isatty():
        yield _Lines(activity)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(activity), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(activity, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Prints a line now and then."""

    def __init__(self, activity: str) -> None:
        self._activity = activity
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < _LINE_EVERY_S or not done:
            return
        self._last = now
        rate = done / (now - self._began)
        left = (total - done) / rate
        print(
            f"{self._activity}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate / 1e6:.2f} MB/s, {left:,.0f} s left",
            file=sys.stderr,
        )
