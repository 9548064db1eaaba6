"""What a rank did and when: one span per action, on the host's clock or by CUDA events.

Spans of all ranks are gathered into the same ``Timeline`` a simulation gives. Clocks are aligned to rank 0's: ranks of
one boot of one machine share the monotonic clock, others measure their offset by the shortest of several round trips.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from chimera.ir.costs import Costs
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.runtime.groups import Groups
from chimera.runtime.shapes import share_json
from chimera.tensor.communicator import Pending

__all__ = ["Ends", "GatherTimes", "Mark", "Recorder"]

Mark = float | torch.cuda.Event
"""A moment: seconds on the host's clock, or an event on a CUDA stream."""

_ROUND_TRIPS = 16
_TAG = 2


_Span = tuple[int, Lane, Mark, Mark]
"""Position in the program, lane, start, end."""


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
    """Records the spans of one rank for the latest step, and the gathers of weights that it began with."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._on_cuda = groups.device.type == "cuda"
        self._spans: list[_Span] = []
        self.mark: Callable[[], Mark] = self._event if self._on_cuda else time.perf_counter
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
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._base = (time.perf_counter(), event)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, position: int, lane: Lane, start: Mark, end: Mark) -> None:
        """Record one span of the action at ``position`` of this rank's program."""
        self._spans.append((position, lane, start, end))

    def ends_of(self, collectives: Sequence[Pending]) -> Ends:
        """Note when ``collectives``, which have just been started, end."""
        ends = Ends(len(collectives), [])
        for pending in collectives:
            pending.when_done(partial(self._note, ends.marks))
        return ends

    def _note(self, marks: list[Mark]) -> None:
        marks.append(self.mark())

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
                pending.when_done(partial(self._note, gather.ends))

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

    def timeline(self, schedule: Schedule) -> Timeline:
        """Gather the latest step of all ranks of this pipeline, in seconds from its first start; a collective."""
        offset = self._offset()
        mine = torch.tensor(
            [
                (p, lane, self._seconds(start) + offset, self._seconds(end) + offset)
                for p, lane, start, end in self._spans
            ],
            dtype=torch.float64,
        ).reshape(-1, 4)
        lengths = self._groups.gather(torch.tensor([len(mine)]))
        padded = torch.zeros(int(max(lengths)), 4, dtype=torch.float64)
        padded[: len(mine)] = mine
        rows = self._groups.gather(padded)
        ranks = self._groups.grid.pipeline_group(self._groups.rank)
        start = min((float(rows[r][: lengths[r], 2].min()) for r in ranks if lengths[r]), default=0.0)
        spans = [
            (rank, Lane(int(lane)), schedule.actions[rank][int(position)], begin - start, end - start)
            for rank, world_rank in enumerate(ranks)
            for position, lane, begin, end in np.asarray(rows[world_rank][: lengths[world_rank]])
        ]
        return Timeline.from_spans(
            spans,
            num_ranks=len(ranks),
            name=schedule.name,
            activations=Costs().resolve(schedule).activations,
            microbatch_to_route=schedule.microbatch_to_route,
        )

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
