"""What a run's record and the files of its ranks say of the job together: does it run, stand still, or is it gone.

A rank that is gone says nothing, so its silence is judged: by its process where it is of this host, by the time since
its last word elsewhere. Clocks of hosts are taken to agree within a few seconds.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from chimera.errors import FormatError
from chimera.train.status import RankStatus, read_status
from chimera.train.tracking.record import RunRecord

__all__ = ["JobState", "JobView", "RankState", "RankView", "look_at", "look_at_ranks"]

RankState = Literal["running", "waiting", "stalled", "silent", "dead", "unknown", "unreadable", "finished", "failed"]
JobState = Literal["starting", "running", "stalled", "failing", "dead", "finished", "interrupted", "failed"]

_GRACE_S: Final = 5.0
"""How much later than due a word may come."""
_STALL_S: Final = 10.0
_STALL_STEPS: Final = 5.0
"""At one place for longer than the former, and than so many steps take, a rank stands still."""
_AT_THE_END: Final = "waiting for reductions"
_GONE: Final = frozenset({"silent", "dead"})
_ALIVE: Final = frozenset({"running", "waiting", "stalled"})


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank.

    Attributes:
        rank: in the world.
        state: as judged here.
        status: its last word; None where it said none, or none that can be read.
        silent_s: time since then.
        waits_for: the ranks that it waits for.
        waits_s: for how long.
        note: why its file cannot be read, or why it failed.
    """

    rank: int
    state: RankState
    status: RankStatus | None = None
    silent_s: float = 0.0
    waits_for: tuple[int, ...] = ()
    waits_s: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """The job: its record, its ranks, and its state with the reason for it."""

    record: RunRecord
    ranks: tuple[RankView, ...]
    state: JobState
    reason: str | None

    @property
    def goes_on(self) -> bool:
        """Whether more may come."""
        return self.state in {"starting", "running", "stalled", "failing"}

    @property
    def step(self) -> int:
        """Steps done, as far as anyone has said."""
        return max([self.record.last.step, *(each.status.step for each in self.ranks if each.status)])


def look_at(folder: Path, record: RunRecord, *, now_s: float, host: str | None = None) -> JobView:
    """Read the files of all ranks of the run's last start and judge them.

    Args:
        folder: of the run.
        record: of the run.
        now_s: the time, in seconds of the system's clock.
        host: this host's name, where processes can be asked for; the system's by default.
    """
    ranks = look_at_ranks(
        folder,
        len(record.last.origin.hosts),
        since_s=record.last.started_s,
        now_s=now_s,
        host=host or socket.gethostname(),
    )
    return JobView(record, ranks, *_judged(record, ranks))


def look_at_ranks(folder: Path, size: int, *, since_s: float, now_s: float, host: str) -> tuple[RankView, ...]:
    """Read and judge the files of ``size`` ranks; what was said before ``since_s`` is of an earlier start."""
    found: dict[int, RankStatus] = {}
    notes: dict[int, str] = {}
    for rank in range(size):
        try:
            status = read_status(folder, rank)
        except (FormatError, OSError) as error:
            notes[rank] = str(error)
            continue
        if status is not None and status.time_s >= since_s:
            found[rank] = status
    return tuple(
        _rank_view(found[rank], found, now_s=now_s, host=host)
        if rank in found
        else RankView(rank, "unreadable" if rank in notes else "unknown", note=notes.get(rank))
        for rank in range(size)
    )


def _rank_view(status: RankStatus, all_: Mapping[int, RankStatus], *, now_s: float, host: str) -> RankView:
    silent_s = max(0.0, now_s - status.time_s)
    at_one_place_s = status.unchanged_s + silent_s
    waits_for = _awaited(status, all_)
    waits_s = None if not waits_for else status.waited_s if status.awaited is not None else at_one_place_s
    state: RankState = "waiting" if waits_for else "running"
    if status.end is not None:
        state = "finished" if status.end == "finished" else "failed"
    elif status.host == host and silent_s > 2 * status.interval_s and not _is_alive(status.process_id):
        state = "dead"
    elif silent_s > 2 * status.interval_s + _GRACE_S:
        state = "silent"
    elif at_one_place_s > max(_STALL_S, _STALL_STEPS * (status.step_s or 0.0)):
        state = "stalled"
    return RankView(
        status.rank,
        state,
        status,
        silent_s=silent_s,
        waits_for=waits_for,
        waits_s=waits_s,
        note=status.end if state == "failed" else None,
    )


def _awaited(status: RankStatus, all_: Mapping[int, RankStatus]) -> tuple[int, ...]:
    """Return the ranks that one waits for: who owes it a message, or, at the end of its program, who is not there."""
    if status.end is not None:
        return ()
    if status.awaited is not None:
        return (status.awaited,)
    if _AT_THE_END not in status.activity:
        return ()
    return tuple(other.rank for other in all_.values() if other.end is None and _is_behind(other, status))


def _is_behind(other: RankStatus, status: RankStatus) -> bool:
    """Return whether a rank is not where the other one is, at the end of its program."""
    return other.step < status.step or (other.step == status.step and other.position is not None)


def _judged(record: RunRecord, ranks: Sequence[RankView]) -> tuple[JobState, str | None]:
    """Return the state of a job, and what it is judged by where it is not plain."""
    end = record.last.end
    if end == "finished":
        return "finished", None
    if end is not None:
        return ("interrupted", None) if end == "interrupted" else ("failed", end.removeprefix("failed: "))
    heard = [each for each in ranks if each.status is not None]
    gone = [each for each in ranks if each.state in _GONE]
    failed = next((f"rank {each.rank} {each.note}" for each in ranks if each.state == "failed"), None)
    if heard and all(each.state == "finished" for each in heard):
        return "finished", None
    if heard and not any(each.state in _ALIVE for each in heard):
        return "dead", failed or f"no rank has said anything for {min(each.silent_s for each in gone):.0f} s"
    if failed is not None:
        return "failing", failed
    if gone:
        return "failing", f"{_named(gone)}: no word for {min(each.silent_s for each in gone):.0f} s"
    stalled = [each for each in ranks if each.state == "stalled"]
    if stalled:
        # Those that wait are held up by one that does not.
        causes = [each for each in stalled if not each.waits_for] or stalled
        return "stalled", f"{_named(causes)} at one place for {max(_place_s(each) for each in causes):.0f} s"
    return ("running" if heard else "starting"), None


def _place_s(view: RankView) -> float:
    assert view.status is not None, "judged by its status"
    return view.status.unchanged_s + view.silent_s


def _named(views: Sequence[RankView]) -> str:
    numbers = ", ".join(str(each.rank) for each in views[:8]) + (" and more" if len(views) > 8 else "")
    return f"rank{'s' * (len(views) > 1)} {numbers}"


def _is_alive(process_id: int) -> bool:
    """Return whether a process of this host runs; one that ended and was not waited for does not."""
    if process_id <= 0:
        return False
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    try:
        state = (
            Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return True
    return state[:1] not in (["Z"], ["X"])
