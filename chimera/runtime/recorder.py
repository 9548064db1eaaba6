"""What a rank did and when: one span per action, on the host's clock or by CUDA events.

Spans of all ranks are gathered into the same ``Timeline`` a simulation gives (``runtime.gathered``). Clocks are aligned
to rank 0's: ranks of one boot of one machine share the monotonic clock, others measure their offset by the shortest of
several round trips.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch

from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.runtime.gathered import COLUMNS, timelines_of
from chimera.runtime.groups import Groups
from chimera.runtime.marks import Mark, mark_on_stream
from chimera.runtime.shapes import share_json
from chimera.tensor.communicator import Pending

__all__ = ["Ends", "GatherTimes", "Recorder"]

_ROUND_TRIPS = 16
_EVENTS = 2000
_TAG = 2


_Span = tuple[int, Lane, Mark, Mark, Mark | None, float]
"""Position in the program, lane, start, end; of a receive, when the message was there; bytes allocated behind it."""
_UNKNOWN: Final = math.nan


@dataclass(frozen=True, slots=True)
class GatherTimes:
    """How long updated weights were on their way to the other replicas, under sharding.

    Attributes:
        under_way_s: from the start of the gathers to the end of the last one.
        waited_s: how long forwards waited for them.
    """

    under_way_s: float
    waited_s: float

    @property
    def hidden_s(self) -> float:
        """How long they were under way beside other work."""
        return max(0.0, self.under_way_s - self.waited_s)


@dataclass(frozen=True, slots=True)
class Ends:
    """When collectives ended: how many there are, and the ends of those that have told."""

    number: int
    marks: list[Mark]


@dataclass(slots=True)
class _Gather:
    """Gathers started together: when, when each ended, and who waited from when to when."""

    start: Mark
    ends: list[Mark] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)


class Recorder:
    """Records the spans of one rank for the latest step, and the gathers of weights that it began with.

    Args:
        groups: this rank's place.
        details: whether to note on CUDA what memory is allocated after each computation.
    """

    def __init__(self, groups: Groups, *, details: bool = False) -> None:
        self._groups = groups
        self._on_cuda = groups.device.type == "cuda"
        self._with_memory = details and self._on_cuda
        self._spans: list[_Span] = []
        self.mark: Callable[[], Mark] = mark_on_stream if self._on_cuda else time.perf_counter
        """Returns this moment: on the stream where there is one, else on the host's clock."""
        self._base: tuple[float, torch.cuda.Event] | None = None
        self._offset_s: float | None = None
        self._gather: _Gather | None = None
        self._next_gather: _Gather | None = None

    def begin(self) -> None:
        """Forget the last step; gathers started since belong to the one that begins."""
        self._spans = []
        if self._next_gather is not None:
            self._gather, self._next_gather = self._next_gather, None
        if self._on_cuda:
            torch.cuda.synchronize(self._groups.device)
            self._base = (time.perf_counter(), mark_on_stream())

    def add(self, position: int, lane: Lane, start: Mark, end: Mark) -> None:
        """Record one span of the action at ``position`` of this rank's program."""
        held = float(torch.cuda.memory_allocated(self._groups.device)) if self._with_memory else _UNKNOWN
        self._spans.append((position, lane, start, end, None, held))

    def received(self, position: int, start: Mark, end: Mark, arrived: Mark | None) -> None:
        """Record that a message was waited for from ``start`` to ``end``, and when it was there, if that is known."""
        self._spans.append((position, Lane.RECEIVE, start, end, arrived, _UNKNOWN))

    @property
    def num_events(self) -> int:
        """Spans recorded since the latest step began."""
        return len(self._spans)

    def event_s(self) -> float:
        """Return what recording one span takes here, the median of many; what is recorded stays as it is."""
        kept, self._spans = self._spans, []
        times = []
        for _ in range(_EVENTS):
            begin = time.perf_counter()
            self.add(0, Lane.COMPUTE, self.mark(), self.mark())
            times.append(time.perf_counter() - begin)
        self._spans = kept
        return statistics.median(times)

    def ends_of(self, collectives: Sequence[Pending]) -> Ends:
        """Note when ``collectives``, which have just been started, end."""
        ends = Ends(len(collectives), [])
        for pending in collectives:
            pending.when_done(partial(_note, ends.marks, self.mark))
        return ends

    def add_until(self, position: int, lane: Lane, start: Mark, ends: Ends) -> None:
        """Record one span that lasted until the last of ``ends``, or until now where not all of them could be told."""
        if ends.number and len(ends.marks) == ends.number:
            self.add(position, lane, start, self._latest(ends.marks))
        else:
            self.add(position, lane, start, self.mark())

    def _latest(self, marks: Sequence[Mark]) -> Mark:
        # Events are in order of a stream, and to ask one for its time would wait for it.
        return marks[-1] if self._on_cuda else max(marks, key=self._seconds)

    def gathering(self, start: Mark, gathers: Sequence[Pending]) -> None:
        """Note that ``gathers`` were started from ``start`` on; the next step's forwards wait for them."""
        if gathers:
            gather = self._next_gather = _Gather(start)
            for pending in gathers:
                pending.when_done(partial(_note, gather.ends, self.mark))

    def waited(self, start: Mark) -> None:
        """Note that a forward has waited for gathered weights since ``start``."""
        if self._gather is not None:
            self._gather.waits.append((start, self.mark()))

    def gather_times(self) -> GatherTimes:
        """Return the times of the gathers that the latest step began with, the mean over all ranks; a collective.

        Ranks without any, as in a first step or without sharding, count as 0.
        """
        mine = [0.0, 0.0]
        if self._gather is not None and self._gather.ends:
            end = max(self._seconds(mark) for mark in self._gather.ends)
            mine[0] = end - self._seconds(self._gather.start)
            mine[1] = sum(self._seconds(last) - self._seconds(first) for first, last in self._gather.waits)
        total = self._groups.sum_everywhere(torch.tensor(mine, dtype=torch.float64)) / self._groups.size
        return GatherTimes(*total.tolist())

    def timelines(self, schedule: Schedule) -> tuple[Timeline, ...]:
        """Gather the latest step of all ranks, one timeline per pipeline in seconds from its first start; a collective.

        Pipeline k is that of world ranks k, k + t · d, ….
        """
        mine = torch.tensor([self._row(span) for span in self._spans], dtype=torch.float64).reshape(-1, COLUMNS)
        lengths = self._groups.gather(torch.tensor([len(mine)]))
        padded = torch.zeros(int(max(lengths)), COLUMNS, dtype=torch.float64)
        padded[: len(mine)] = mine
        rows = [part[: int(length)].numpy() for part, length in zip(self._groups.gather(padded), lengths, strict=True)]
        grid = self._groups.grid
        return timelines_of(schedule, [[rows[rank] for rank in grid.pipeline_group(k)] for k in range(grid.width)])

    def _row(self, span: _Span) -> tuple[float, ...]:
        position, lane, start, end, arrived, held = span
        offset = self._offset()
        there = _UNKNOWN if arrived is None else self._seconds(arrived) + offset
        return position, lane, self._seconds(start) + offset, self._seconds(end) + offset, there, held

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._base is not None, "begin() records the base event"
        mark.synchronize()
        return self._base[0] + float(self._base[1].elapsed_time(mark)) / 1e3

    def _offset(self) -> float:
        """Return what to add to this host's clock to get rank 0's."""
        if self._offset_s is None:
            boot = Path("/proc/sys/kernel/random/boot_id")
            here = boot.read_text().strip() if boot.exists() else str(self._groups.rank)
            shared = here == share_json(self._groups, here, root=0)
            different = self._groups.gather(torch.tensor([0 if shared else 1]))
            self._offset_s = 0.0
            for rank in (r for r, flag in enumerate(different) if int(flag)):
                if self._groups.rank == rank:
                    self._offset_s = self._measure(rank)
                elif self._groups.rank == 0:
                    self._answer(rank)
        return self._offset_s

    def _measure(self, rank: int) -> float:
        """Ask rank 0 for its clock; the shortest round trip bounds the error best."""
        control = self._groups.control
        assert control is not None, f"rank {rank} has a peer"
        trips = []
        for _ in range(_ROUND_TRIPS):
            answer = torch.zeros(1, dtype=torch.float64)
            asked = time.perf_counter()
            control.send(answer, 0, _TAG).wait()
            control.receive(answer, 0, _TAG).wait()
            got = time.perf_counter()
            trips.append((got - asked, float(answer) - (asked + got) / 2))
        return min(trips)[1]

    def _answer(self, rank: int) -> None:
        control = self._groups.control
        assert control is not None, "rank 0 has a peer"
        for _ in range(_ROUND_TRIPS):
            clock = torch.zeros(1, dtype=torch.float64)
            control.receive(clock, rank, _TAG).wait()
            clock[0] = time.perf_counter()
            control.send(clock, rank, _TAG).wait()


def _note(marks: list[Mark], mark: Callable[[], Mark]) -> None:
    """Note this moment. No method: called from a communicator's own thread, it must not be the last to hold its group.

    A group that its own thread lets go ends the process.
    """
    marks.append(mark())
