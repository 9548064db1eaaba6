"""What every rank is doing, for the moment when one of them dies or stalls, and for whoever looks on.

Each rank publishes its position in the program once a second, from a thread, to the job's store and to a listener. When
a wait fails, the first rank to notice collects the positions and prints the grid with a marker at the action each rank
is at. The threads of the others hear of it there and end their waits, so that no rank waits for one that waits for the
one that is lost.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["UNDER_WAY", "Here", "Position", "Watch"]

UNDER_WAY: Final = ", waiting for reductions and sends under way"
"""Behind the activity of a rank that has run its program to the end."""

_REPORT = "report"
_INTERVAL_S = 1.0
_NAP_S = 0.1
"""How soon the thread notices that it is to end."""
_SETTLE_S = 1.5
"""How long the reporting rank waits for the others' last positions."""


class Here(NamedTuple):
    """A rank's place in its program, the action there, and the rank whose message it waits for, and since when.

    The time is in seconds of the monotonic clock; what does not apply is None.
    """

    position: int | None = None
    action: str | None = None
    awaited: int | None = None
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is: what it is busy with, its place in the program and the action there, and when it said so.

    Attributes:
        awaited: the rank whose message it waits for, and ``waited_s`` for how long; None where it waits for none.
    """

    activity: str
    position: int | None
    action: str | None
    time_s: float
    awaited: int | None = None
    waited_s: float | None = None


class Watch:
    """Publishes this rank's position and reads everyone's.

    Args:
        store: the job's store; None for a rank on its own, which publishes nothing until there is a listener.
        rank, size: this rank and how many there are.
        here: a method, asked for the place in the program; when its object is gone, the watch ends.
        end_waits: a method, called from the thread when some rank reports a failure.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        here: Callable[[], Here],
        end_waits: Callable[[], None],
    ) -> None:
        self.activity = "starting"
        self._store = None if store is None else PrefixStore("watch", store)
        self._rank = rank
        self._size = size
        # Weakly: the thread would otherwise keep a pipeline that nobody uses any more, and its connections, alive.
        self._here = weakref.WeakMethod(here)
        self._end_waits = weakref.WeakMethod(end_waits)
        self._listener: Callable[[Position], None] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._start()

    def listen(self, listener: Callable[[Position], None]) -> None:
        """Have ``listener`` called from the thread with every position of this rank; it raises nothing."""
        self._listener = listener
        if self._thread is None:
            self._start()

    def position(self) -> Position:
        """Return where this rank is."""
        method = self._here()
        here = method() if method else Here()
        waited_s = None if here.since_s is None else max(0.0, time.monotonic() - here.since_s)
        return Position(self.activity, here.position, here.action, time.time(), here.awaited, waited_s)

    def publish(self) -> None:
        """Tell the store and the listener where this rank is."""
        position = self.position()
        if self._store is not None:
            self._store.set(f"position/{self._rank}", json.dumps(asdict(position)))
        if self._listener is not None:
            self._listener(position)

    def close(self) -> None:
        """Stop publishing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def positions(self) -> Sequence[Position | None]:
        """Return the last published position of every rank, None for a rank that never published."""
        if self._store is None:
            return [self.position()]
        found: list[Position | None] = []
        for rank in range(self._size):
            key = f"position/{rank}"
            found.append(Position(**json.loads(self._store.get(key))) if self._store.check([key]) else None)
        return found

    def claim_report(self) -> bool:
        """Publish this rank's position, and return true on the one rank that is to print the report.

        Raises:
            RuntimeError: the store itself is gone.
        """
        self.publish()
        if self._store is None:
            return True
        if self._store.add(_REPORT, 1) != 1:
            return False
        time.sleep(_SETTLE_S)
        return True

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="chimera-watch", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        # Not a daemon: caught inside the store as the interpreter goes down, one would take the process with it. This
        # one ends with the main thread, or with its owner.
        due = 0.0
        while not self._stop.wait(_NAP_S) and threading.main_thread().is_alive() and self._here() is not None:
            if time.monotonic() < due:
                continue
            due = time.monotonic() + _INTERVAL_S
            try:
                self.publish()
                end_waits = self._end_waits()
                if end_waits is not None and self._store is not None and self._store.check([_REPORT]):
                    end_waits()
                    return
            except RuntimeError:
                # The store went away with the job; the main thread's own wait tells the user why.
                return
