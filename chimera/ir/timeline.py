"""The timeline: what each rank did when, on which lane, and what memory it held. Simulator and recorder make the same.

It knows spans and sums over them. It knows neither why a rank was idle (``simulate.gaps``) nor how a timeline is
drawn, written or compared (``timeline``, ``plot``). Times may start anywhere; figures here are differences.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import RECEIVES, SENDS, Instruction, Kind, Overlap
from chimera.ir.costs import SECOND
from chimera.ir.memory import activation_changes, peaks
from chimera.ir.table import Table

__all__ = ["LANES", "Lane", "MemoryCurve", "Span", "Timeline"]


class Lane(IntEnum):
    """What a span occupies. Work lanes (COMPUTE, REDUCE) are the rank's own; the others are its messages in flight."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    REDUCE = 3


LANES: Final = {
    kind: Lane.SEND
    if kind in SENDS
    else Lane.RECEIVE
    if kind in RECEIVES
    else Lane.REDUCE
    if kind is Kind.REDUCE_GRAD
    else Lane.COMPUTE
    for kind in Kind
}
"""The lane of each kind in a simulated timeline."""


class Span(NamedTuple):
    """One instruction on one lane of one rank, from ``start`` to ``end``."""

    rank: int
    lane: Lane
    action: Instruction
    start: float
    end: float


class MemoryCurve(NamedTuple):
    """Memory of one rank: ``values[i]`` is held from ``times[i]`` until the next time; ``unit`` is of the values."""

    times: NDArray[np.float64]
    values: NDArray[np.float64]
    unit: str


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans in columns: row ``i`` of ``table`` ran on ``lane[i]`` from ``start[i]`` to ``end[i]``.

    Rows of one rank stand in program order; both rows of a pair carry the pair's span.

    Attributes:
        name: of the schedule.
        unit: of times, "model unit" or "s".
        table: the actions, rank after rank.
        lane: [row], codes of ``Lane``.
        start: [row].
        end: [row].
        activations: [stage], what a micro-batch holds from F to B or W, in units of 1/p of the model; may be empty.
        activation_bytes: [stage], the same in bytes, where known.
        resident_bytes: [rank], weights in all versions held at once, and gradients, where known.
        held_for_weight_grad: [stage], the share of its activations held from I to W; all of it without.
        recorded_memory: measured curves per rank, in place of derived ones.
        microbatch_to_route: the route of each micro-batch; empty where all follow route 0.
    """

    name: str
    unit: str
    table: Table
    lane: NDArray[np.uint8]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    activations: NDArray[np.float64]
    activation_bytes: NDArray[np.float64] | None = None
    resident_bytes: NDArray[np.float64] | None = None
    held_for_weight_grad: NDArray[np.float64] | None = None
    recorded_memory: tuple[MemoryCurve, ...] | None = None
    microbatch_to_route: tuple[int, ...] = ()

    @classmethod
    def from_spans(
        cls,
        spans: Iterable[tuple[int, int, Instruction, float, float]],
        *,
        num_ranks: int,
        name: str = "recorded",
        unit: str = SECOND,
        activations: Sequence[float] | NDArray[np.float64] = (),
        recorded_memory: Iterable[MemoryCurve] | None = None,
        microbatch_to_route: Sequence[int] = (),
        in_program_order: bool = False,
    ) -> "Timeline":
        """Put (rank, lane, instruction, start, end) into columns, each rank's in order of start.

        Spans of one rank that start together keep the order in which they are given; with ``in_program_order`` all do.

        >>> from chimera.ir.action import Action
        >>> spans = [(0, 0, Action(Kind.F, 0, 0), 10.0, 11.0), (0, 0, Action(Kind.B, 0, 0), 11.5, 13.0)]
        >>> timeline = Timeline.from_spans(spans, num_ranks=1)
        >>> timeline.makespan, round(timeline.bubble_fraction, 4)
        (3.0, 0.1667)
        """
        per_rank: list[list[tuple[int, int, Instruction, float, float]]] = [[] for _ in range(num_ranks)]
        for span in spans:
            assert 0 <= span[0] < num_ranks, f"span of rank {span[0]} in a timeline of {num_ranks} ranks"
            assert span[3] <= span[4], f"{span[2]} on rank {span[0]} ends at {span[4]}, before its start {span[3]}"
            per_rank[span[0]].append(span)
        for row in () if in_program_order else per_rank:
            row.sort(key=lambda span: span[3])
        ordered = [span for row in per_rank for span in row]
        width = [2 if type(span[2]) is Overlap else 1 for span in ordered]
        return cls(
            name=name,
            unit=unit,
            table=Table.from_programs([[span[2] for span in row] for row in per_rank]),
            lane=np.repeat(np.array([span[1] for span in ordered], np.uint8), width),
            start=np.repeat(np.array([span[3] for span in ordered], np.float64), width),
            end=np.repeat(np.array([span[4] for span in ordered], np.float64), width),
            activations=np.asarray(activations, np.float64),
            recorded_memory=None if recorded_memory is None else tuple(recorded_memory),
            microbatch_to_route=tuple(microbatch_to_route),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks, those without a span included."""
        return len(self.table.offsets) - 1

    def rows(self, rank: int) -> slice:
        """Return the rows of ``rank``."""
        return slice(int(self.table.offsets[rank]), int(self.table.offsets[rank + 1]))

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the spans of ``rank`` in program order, a pair as one span."""
        rows = self.rows(rank)
        lanes, starts, ends = self.lane[rows].tolist(), self.start[rows].tolist(), self.end[rows].tolist()
        second = self._second_of_pair[rows].tolist()
        for i, row in enumerate(range(rows.start, rows.stop)):
            if not second[i]:
                yield Span(rank, Lane(lanes[i]), self.table.instruction_at(row), starts[i], ends[i])

    @cached_property
    def _second_of_pair(self) -> NDArray[np.bool_]:
        second: NDArray[np.bool_] = self.table.paired & (self.table.kind != Kind.F)
        return second

    @cached_property
    def _clocks(self) -> list[tuple[float, float]]:
        """First start and last end of the work lanes of every rank that has one.

        Messages are left out: a receive may be posted, or a send still be in flight, outside a rank's own work.
        """
        work = (self.lane == Lane.COMPUTE) | (self.lane == Lane.REDUCE)
        clocks = []
        for rank in range(self.num_ranks):
            rows = self.rows(rank)
            if (own := work[rows]).any():
                clocks.append((float(self.start[rows][own].min()), float(self.end[rows][own].max())))
        return clocks

    @property
    def origin(self) -> float:
        """First start over all ranks' work; 0 without any."""
        return min((first for first, _ in self._clocks), default=0.0)

    @property
    def finish(self) -> float:
        """Last end over all ranks' work; 0 without any."""
        return max((last for _, last in self._clocks), default=0.0)

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks: a synchronous step that ends everywhere together."""
        return self.finish - self.origin

    @property
    def span(self) -> float:
        """The longest over ranks of own last end − own first start: a step whose successor need not wait."""
        return max((last - first for first, last in self._clocks), default=0.0)

    @cached_property
    def busy(self) -> NDArray[np.float64]:
        """Time that each rank computes."""
        counted = (self.lane == Lane.COMPUTE) & ~self._second_of_pair
        time = np.where(counted, self.end - self.start, 0.0)
        return np.array([time[self.rows(rank)].sum() for rank in range(self.num_ranks)])

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the total, 1 − busy / (p · makespan), as Chimera and Zero Bubble quote it."""
        total = self.num_ranks * self.makespan
        return 1.0 - float(self.busy.sum()) / total if total else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over ideal time, as Megatron-LM quotes it."""
        ideal = float(self.busy.sum())
        return (self.num_ranks * self.makespan - ideal) / ideal if ideal else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Most activations each rank holds at once, in units of 1/p of the model for one whole micro-batch.

        Held from F to the end of B, or of W where the backward is split. Without ``activations`` every stage counts 1.
        """
        if len(self.activations):
            return peaks(self.table, self.activations, self.held_for_weight_grad)
        return peaks(self.table, np.ones(int(self.table.stage.max(initial=0)) + 1))

    @property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Most bytes each rank holds at once: recorded, or activations + resident; None where bytes are unknown."""
        if self.recorded_memory is not None:
            return tuple(float(curve.values.max(initial=0.0)) for curve in self.recorded_memory)
        if self.activation_bytes is None:
            return None
        resident = np.zeros(self.num_ranks) if self.resident_bytes is None else self.resident_bytes
        held = peaks(self.table, self.activation_bytes, self.held_for_weight_grad)
        return tuple(float(base) + peak for base, peak in zip(resident, held, strict=True))

    def memory(self, rank: int) -> MemoryCurve:
        """Return the memory of ``rank`` over time: recorded, else in bytes where known, else in units."""
        if self.recorded_memory is not None:
            return self.recorded_memory[rank]
        in_bytes = self.activation_bytes is not None
        per_stage = self.activation_bytes if in_bytes else self.activations if len(self.activations) else None
        base = float(self.resident_bytes[rank]) if in_bytes and self.resident_bytes is not None else 0.0
        rows = self.rows(rank)
        changes = activation_changes(self.table, self.held_for_weight_grad)
        stage, change, start, end = (column[rows] for column in (self.table.stage, changes, self.start, self.end))
        if not (changes < 0).any():
            # Each F lets go at its own end.
            stage, start, end = (np.repeat(column[change != 0], 2) for column in (stage, start, end))
            change = np.resize(np.array([1, -1], np.int8), len(stage))
        events = change != 0
        amount = change if per_stage is None else change * per_stage[stage]
        times = np.concatenate([[self.origin], np.where(change > 0, start, end)[events], [self.finish]])
        values = base + np.concatenate([[0.0], np.cumsum(amount[events], dtype=np.float64)])
        values = np.append(values, values[-1])
        # Of changes at one moment only the last is seen: a backward that ends as a forward starts leaves no dip.
        last = np.append(np.diff(times) > 0, [True])
        return MemoryCurve(times[last], values[last], "bytes" if in_bytes else "activations")

    def time_by_kind(self) -> dict[Kind, float]:
        """Return the summed span time of every kind present; a pair's time counts as half forward, half backward."""
        time = (self.end - self.start) * np.where(self.table.paired, 0.5, 1.0)
        sums = np.bincount(self.table.kind, weights=time, minlength=len(Kind)).tolist()
        return {kind: sums[kind] for kind in Kind if (self.table.kind == kind).any()}
