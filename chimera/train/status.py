"""What each rank of a run is at, as a small file per rank in the run's folder, for whoever looks on from outside.

A rank replaces its file about once a second, so that it is always whole; a reader trusts none of it. What the files
together say of the job is ``job``'s business, how they are shown the command's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from pydantic import ConfigDict

from chimera.errors import FormatError
from chimera.train.tracking.value_file import STRICT, read_value, write_value

__all__ = ["RankStatus", "read_status", "status_interval_s", "status_path", "write_status"]

_FOLDER: Final = "status"
_FORMAT: Final = "chimera-status"
_MOST_BYTES: Final = 64 * 1024
_FILES_PER_S: Final = 64
"""Of the whole job: what a file system that many hosts share should not notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What a rank said of itself.

    Attributes:
        rank: in the world.
        host, process_id: where it runs.
        time_s: when it said so, in seconds of its host's clock.
        interval_s: after how long it says something again.
        activity: what it is busy with.
        position, action: its place in its program and the action there; None outside of one.
        unchanged_s: how long it has been at this place.
        awaited: the rank whose message it waits for; None where it waits for none.
        waited_s: for how long.
        step: steps done.
        step_s, tokens_per_s: of its last step, the latter over the whole batch; None before the first.
        idle_share: of the last step's makespan that it did not compute.
        memory_bytes: resident memory of its process.
        device_bytes: memory that it has of a GPU; None on a CPU.
        end: None while it runs, "finished", or why it failed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    rank: int
    host: str
    process_id: int
    time_s: float
    interval_s: float
    activity: str
    position: int | None
    action: str | None
    unchanged_s: float
    awaited: int | None
    waited_s: float | None
    step: int
    step_s: float | None
    tokens_per_s: float | None
    idle_share: float | None
    memory_bytes: int
    device_bytes: int | None
    end: str | None


def status_interval_s(ranks: int) -> float:
    """Return after how long each of so many ranks says something again.

    >>> status_interval_s(8), status_interval_s(1024)
    (1.0, 16.0)
    """
    return max(1.0, ranks / _FILES_PER_S)


def status_path(folder: Path, rank: int) -> Path:
    """Return where a rank's status stands in a run's folder."""
    return folder / _FOLDER / f"rank-{rank:05d}.json"


def write_status(status: RankStatus, folder: Path) -> None:
    """Write a rank's status into a run's folder, whole or not at all.

    Raises:
        OSError: the system cannot.
    """
    write_value(status, status_path(folder, status.rank), _FORMAT)


def read_status(folder: Path, rank: int) -> RankStatus | None:
    """Return what a rank said last, or None where it never said anything.

    Raises:
        FormatError: what stands there is no status, or one of another rank.
    """
    path = status_path(folder, rank)
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        raise FormatError(f"{path}: is no file of at most {_MOST_BYTES} bytes; needed: a {_FORMAT} file")
    status = read_value(RankStatus, path, _FORMAT)
    if status.rank != rank:
        raise FormatError(f"{path}: is the status of rank {status.rank}")
    return status
