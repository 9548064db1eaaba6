"""The text grid of a timeline, as the papers draw it: a row per rank, a column per time slot, micro-batch numbers.

A slot is the longest time that divides every start and duration. Timelines without one (recorded ones) are drawn to
scale instead, a column being 1/width of the makespan. Forward and backward differ by sign as well as by colour. What
does not fit is left out and a note under the grid says how much. Only compute lanes are drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from chimera.ir.action import Instruction, Kind, Overlap
from chimera.ir.timeline import Lane, Span, Timeline
from chimera.timeline.colours import Paint, Painter

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Cell", "Grid", "draw_grid"]

_IDLE: Final = "·"
_SIGNS: Final = {Kind.F: "", Kind.B: "<", Kind.I: "i", Kind.W: "w", Kind.STEP: "s"}
_FILLS: Final = {Kind.B: "<"}
_LEGEND: Final = {
    Kind.F: "3 forward",
    Kind.B: "3< backward",
    Kind.I: "3i input gradient",
    Kind.W: "3w weight gradient",
    Kind.STEP: "s step",
}
_FINEST: Final = 12
"""A slot may be this many times shorter than the shortest action; beyond that times are not commensurable."""
_TOLERANCE: Final = 1e-6


class Cell(NamedTuple):
    """Adjacent characters of one row; idle time has no colours."""

    text: str
    paint: Paint | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A drawn grid: a ruler, one row of cells per rank, notes beneath.

    Attributes:
        ruler: the times above the columns.
        rows: cells per rank, after the rank's label.
        notes: the legend, and what was left out.
    """

    ruler: str
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]

    def plain(self) -> str:
        """Return the grid without colours; it says the same."""
        lines = [self.ruler, *("".join(cell.text for cell in row).rstrip() for row in self.rows), *self.notes]
        return "\n".join(line.rstrip() for line in lines)

    def rich(self) -> "Text":
        """Return the grid in colours, for a rich console; print it without wrapping."""
        from rich.text import Text

        text = Text(no_wrap=True, overflow="ignore").append(self.ruler + "\n", style="dim")
        for row in self.rows:
            for cell in row:
                text.append(cell.text, style=f"{cell.paint.text} on {cell.paint.fill}" if cell.paint else None)
            text.append("\n")
        return text.append("\n".join(self.notes), style="dim")


class _Slots(NamedTuple):
    """How time becomes columns: ``time`` per slot, ``width`` characters each, ``shown`` of ``total`` slots."""

    time: float
    width: int
    shown: int
    total: int


def draw_grid(timeline: Timeline, *, columns: int = 80) -> Grid:
    """Draw ``timeline`` at most ``columns`` characters wide.

    >>> from chimera.ir.schedule import Schedule
    >>> from chimera.ir.costs import Costs
    >>> from chimera.simulate import simulate
    >>> schedule = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]])
    >>> print(draw_grid(simulate(schedule, Costs(forward=1, backward=2))).plain())
            0         5
    rank 0  0 1 · · 0<< · 1<<
    rank 1  · 0 0<< 1 1<< · ·
    3 forward, 3< backward, · idle; one column of 2 characters is 1 model unit
    """
    spans = [
        [span for span in timeline.spans(rank) if span.lane is Lane.COMPUTE and span.end > span.start]
        for rank in range(timeline.num_ranks)
    ]
    label_width = len(f"rank {timeline.num_ranks - 1}") + 2
    room = max(columns - label_width, 1)
    slots = _exact_slots(timeline, spans, room) or _Slots(timeline.makespan / room, 1, room, room)
    painter = Painter(timeline)
    rows = tuple(
        (Cell(f"rank {rank}".ljust(label_width)), *_cells(row, timeline.origin, slots, painter))
        for rank, row in enumerate(spans)
    )
    return Grid(" " * label_width + _ruler(slots), rows, tuple(_notes(timeline, spans, slots)))


def _exact_slots(timeline: Timeline, spans: Sequence[Sequence[Span]], room: int) -> _Slots | None:
    """Return slots that divide every span, or None where there are none."""
    flat = [span for row in spans for span in row]
    if not flat:
        return None
    time = _common_divisor(
        sorted({round(s.end - s.start, 9) for s in flat} | {s.start - timeline.origin for s in flat})
    )
    if time is None or time * _FINEST < min(span.end - span.start for span in flat):
        return None
    width = max(ceil((len(_label(span.action)) + 1) / round((span.end - span.start) / time)) for span in flat)
    total = round(timeline.makespan / time)
    return _Slots(time, width, min(total, max(room // width, 1)), total)


def _common_divisor(times: Sequence[float]) -> float | None:
    """Return the greatest time that divides all of ``times`` within tolerance; None where it would be tiny."""
    positive = [time for time in times if time > 0]
    divisor, smallest = positive[0], positive[-1] * _TOLERANCE
    for time in positive[1:]:
        a, b = time, divisor
        while b > smallest:
            # The remainder next to the divisor is a rounding of no remainder.
            a, b = b, min(a % b, b - a % b)
        if a <= 10 * smallest:
            return None
        divisor = a
    return divisor


def _cells(spans: Sequence[Span], origin: float, slots: _Slots, painter: Painter) -> Iterator[Cell]:
    """Yield the cells of one rank up to the last slot shown."""
    column = 0
    for span in spans:
        start, end = (round((time - origin) / slots.time) for time in (span.start, span.end))
        start, end = max(start, column), min(end, slots.shown)
        if end > start:
            yield from _idle(start - column, slots.width)
            yield from _bar(span, (end - start) * slots.width, painter)
            column = end
    yield from _idle(slots.shown - column, slots.width)


def _idle(count: int, width: int) -> Iterator[Cell]:
    if count:
        yield Cell((_IDLE + " " * (width - 1)) * count)


def _bar(span: Span, characters: int, painter: Painter) -> Iterator[Cell]:
    label = _label(span.action)
    last = span.action.backward if isinstance(span.action, Overlap) else span.action
    if len(label) > characters:
        label = (_SIGNS[last.kind] or "-") * min(characters, 1)
    bar = label + _FILLS.get(last.kind, " ") * (characters - len(label) - 1)
    yield Cell(bar.ljust(characters)[:characters], painter.paint(span.rank, span.action))


def _label(instruction: Instruction) -> str:
    if isinstance(instruction, Overlap):
        return f"{_label(instruction.forward)}/{_label(instruction.backward)}"
    return f"{'' if instruction.microbatch is None else instruction.microbatch}{_SIGNS.get(instruction.kind, '')}"


def _ruler(slots: _Slots) -> str:
    """Return the times over every fifth slot, wider apart where they would touch."""
    every = 5
    while every * slots.width <= len(f"{slots.shown * slots.time:.4g}") + 1:
        every *= 2
    marks = (f"{slot * slots.time:.4g}".ljust(every * slots.width) for slot in range(0, slots.shown, every))
    return "".join(marks).rstrip()


def _notes(timeline: Timeline, spans: Sequence[Sequence[Span]], slots: _Slots) -> Iterator[str]:
    kinds = set(timeline.table.kind[timeline.lane == Lane.COMPUTE].tolist())
    legend = [text for kind, text in _LEGEND.items() if kind in kinds]
    if timeline.table.paired.any():
        legend.append("3/2< a pair")
    size = f"{slots.width} characters" if slots.width > 1 else "1 character"
    yield f"{', '.join([*legend, f'{_IDLE} idle'])}; one column of {size} is {slots.time:.4g} {timeline.unit}"
    if slots.shown < slots.total:
        needed = slots.total * slots.width + len(f"rank {timeline.num_ranks - 1}") + 2
        left_out = sum(round((span.end - timeline.origin) / slots.time) > slots.shown for row in spans for span in row)
        yield (
            f"cut at slot {slots.shown} of {slots.total}: {left_out} actions end beyond it; "
            f"the whole grid needs {needed} columns"
        )
    hidden = sum(
        round((s.end - timeline.origin) / slots.time) <= round((s.start - timeline.origin) / slots.time)
        for row in spans
        for s in row
    )
    if hidden:
        yield f"{hidden} actions are shorter than a column and not shown"
