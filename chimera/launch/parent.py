"""A rank that ends with the process that started it, so that a launcher which is killed leaves no rank behind."""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Final

__all__ = ["end_with_parent"]

_LOOK_S: Final = 0.5


def end_with_parent(rank: int) -> None:
    """End this process, saying why on stderr, as soon as its parent has ended; returns at once."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent, rank), name="chimera-parent", daemon=True).start()


def _watch(parent: int, rank: int) -> None:
    # An orphan gets another parent.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    message = f"error: rank {rank} ends because the process that started it (number {parent}) was ended\n"
    with suppress(OSError):
        # Its output may have gone through the process that was ended.
        os.write(sys.stderr.fileno(), message.encode())
    os._exit(1)
