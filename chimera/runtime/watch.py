"""What every rank is doing, for the moment when one of them dies or stalls.

Each rank publishes its position in the program once a second, from a thread, to the job's store. When a wait fails, the
first rank to notice collects the positions and prints the grid with a marker at the action each rank is at. The threads
of the others hear of it there and end their waits, so that no rank waits for one that waits for the one that is lost.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["Position", "Watch"]

_REPORT = "report"
_INTERVAL_S = 1.0
_NAP_S = 0.1
"""How soon the thread notices that it is to end."""
_SETTLE_S = 1.5
"""How long the reporting rank waits for the others' last positions."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is: what it is busy with, its place in the program and the action there, and when it said so."""

    activity: str
    position: int | None
    action: str | None
    time_s: float


class Watch:
    """Publishes this rank's position and reads everyone's.

    Args:
        store: the job's store.
        rank, size: this rank and how many there are.
        here: a method, asked for the place in the program and the action there, both None between programs; when its
            object is gone, the watch ends.
        end_waits: a method, called from the thread when some rank reports a failure.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        here: Callable[[], tuple[int | None, str | None]],
        end_waits: Callable[[], None],
    ) -> None:
        self.activity = "starting"
        self._store = PrefixStore("watch", store)
        self._rank = rank
        self._size = size
        # Weakly: the thread would otherwise keep a pipeline that nobody uses any more, and its connections, alive.
        self._here = weakref.WeakMethod(here)
        self._end_waits = weakref.WeakMethod(end_waits)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chimera-watch", daemon=False)
        self._thread.start()

    def publish(self) -> None:
        """Tell the store where this rank is."""
        here = self._here()
        place = Position(self.activity, *(here() if here else (None, None)), time.time())
        self._store.set(f"position/{self._rank}", json.dumps(asdict(place)))

    def close(self) -> None:
        """Stop publishing."""
        self._stop.set()
        self._thread.join()

    def positions(self) -> Sequence[Position | None]:
        """Return the last published position of every rank, None for a rank that never published."""
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
        if self._store.add(_REPORT, 1) != 1:
            return False
        time.sleep(_SETTLE_S)
        return True

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
                if end_waits is not None and self._store.check([_REPORT]):
                    end_waits()
                    return
            except RuntimeError:
                # The store went away with the job; the main thread's own wait tells the user why.
                return
