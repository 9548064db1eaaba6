"""The command that a start of a run came from, and when it was given.

A process of its own, which may start the ranks: it knows this before torch is loaded, so nothing here needs it.
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Command"]


@dataclass(frozen=True, slots=True)
class Command:
    """The command that a start came from.

    Attributes:
        words: as they were given.
        started_s: when, in seconds of the system's clock.
    """

    words: tuple[str, ...]
    started_s: float

    @classmethod
    def here(cls) -> "Command":
        """Return that of this process, whose start the system tells on Linux; elsewhere it is now."""
        return cls(tuple(sys.argv), time.time() - _age_s())

    def again(self) -> "Command":
        """Return the same words, given now: a restart has a beginning of its own."""
        return replace(self, started_s=time.time())


def _age_s() -> float:
    """Return how long ago this process started."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
