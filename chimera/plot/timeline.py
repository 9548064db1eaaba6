"""``plot_timeline``: one or several timelines one above the other on one time axis, memory beneath each if wanted.

Rows are ranks. Bars are coloured as in the text grid (``timeline.colours``), with micro-batch numbers where they fit;
gradient reductions, which run beside computation, are strips along the lower edge of a row, and messages under way to
the rank, if wanted, a line along the upper one. Idle time is white.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from chimera.errors import UsageError
from chimera.ir.action import Action, Instruction, Kind, Overlap
from chimera.ir.costs import SECOND
from chimera.ir.timeline import Lane, Span, Timeline
from chimera.plot.figure import INK, check_paths, new_figure, save, settings
from chimera.timeline.colours import REDUCTION, Painter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_timeline"]

_ROW_IN: Final = 0.27
_MIN_PANEL_IN: Final = 0.75
_MARGINS_IN: Final = 0.62
_SIDES_IN: Final = 1.0
_MEMORY_ROW_IN: Final = 0.19
_LEGEND_IN: Final = 0.55
_LEGEND_COLUMNS: Final = 5
"""More of the longest labels than this do not fit side by side."""
_MAX_HEIGHT_IN: Final = 40.0
_BAR_HEIGHT: Final = 0.84
_STRIP_HEIGHT: Final = 0.16
_MESSAGE_HEIGHT: Final = 0.09
_MESSAGE: Final = "#2f7d5b"
_POINTS_PER_IN: Final = 72.0
_DIGIT_WIDTH: Final = 0.64
"""Width of a digit as a share of the font's size."""
_MOST_LABELS: Final = 6000
"""More numbers than this nobody reads, and each costs a text object."""
_EDGE: Final = "#ffffff"
_MEMORY_FILL: Final = "#cfd8dc"
_MEMORY_LINE: Final = "#546e7a"

_WORDS: Final = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}


class _Scale(NamedTuple):
    """How a timeline's unit is shown: times are multiplied by ``factor`` and labelled with ``label``."""

    factor: float
    label: str


class _Frame(NamedTuple):
    """Where a panel's times lie: on the axis, and in points on paper."""

    origin: float
    factor: float
    points_per_time: float

    def x(self, time: float) -> float:
        """Return the place of ``time`` on the axis."""
        return (time - self.origin) * self.factor


def plot_timeline(
    timelines: Sequence[tuple[str, Timeline]],
    path: str | Path | Sequence[str | Path],
    *,
    memory: bool = False,
    messages: bool = False,
    width_in: float = 11.0,
) -> None:
    """Draw (title, timeline) panels from top to bottom into PDF, PNG or SVG files.

    Each panel's title gives its makespan and bubble. All panels start at their own first action and share the axis.

    Args:
        timelines: at least one; all in the same unit.
        path: one path, or several for the same figure in several formats.
        memory: whether each panel gets the memory of its ranks over time beneath it.
        messages: whether messages under way are drawn above the row of the rank that they go to.
        width_in: of the figure.

    Raises:
        UsageError: no timeline, timelines of different units, or a suffix that names no format.
    """
    paths = check_paths(path)
    if not timelines:
        raise UsageError("no timeline to draw; needed: at least one")
    units = sorted({timeline.unit for _, timeline in timelines})
    if len(units) > 1:
        raise UsageError(
            f"timelines in {' and '.join(units)} cannot share one time axis; simulate with --costs in seconds, or draw "
            "them in separate figures"
        )
    with settings():
        figure = _draw(timelines, memory=memory, messages=messages, width_in=width_in)
        save(figure, paths)


def _draw(timelines: Sequence[tuple[str, Timeline]], *, memory: bool, messages: bool, width_in: float) -> "Figure":
    heights = []
    for _, timeline in timelines:
        heights.append(max(timeline.num_ranks * _ROW_IN, _MIN_PANEL_IN))
        if memory:
            heights.append(max(timeline.num_ranks * _MEMORY_ROW_IN, _MIN_PANEL_IN))
    total = sum(heights) + _MARGINS_IN * len(heights) + _LEGEND_IN
    figure = new_figure(width_in, min(total, _MAX_HEIGHT_IN))
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(timeline.makespan for _, timeline in timelines)
    scale = _scale(timelines[0][1].unit, longest)
    points = (width_in - _SIDES_IN) * _POINTS_PER_IN
    panels = iter(axes)
    for title, timeline in timelines:
        _draw_panel(next(panels), title, timeline, scale, points_per_time=points / (longest or 1.0), messages=messages)
        if memory:
            _draw_memory(next(panels), timeline, scale)
    # A little air on the right keeps the last bar off the edge.
    axes[-1].set_xlim(0, longest * scale.factor * 1.005 or 1.0)
    axes[-1].set_xlabel(f"time ({scale.label})")
    figure.legend(
        handles=list(_legend([timeline for _, timeline in timelines], messages=messages)),
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        handleheight=0.9,
        columnspacing=1.4,
    )
    return figure


def _scale(unit: str, longest: float) -> _Scale:
    if unit != SECOND:
        return _Scale(1.0, f"{unit}s")
    if longest >= 1.0:
        return _Scale(1.0, "s")
    return _Scale(1e3, "ms") if longest >= 1e-3 else _Scale(1e6, "µs")


def _draw_panel(
    axes: "Axes", title: str, timeline: Timeline, scale: _Scale, *, points_per_time: float, messages: bool
) -> None:
    from matplotlib.collections import PolyCollection

    frame = _Frame(timeline.origin, scale.factor, points_per_time)
    painter = Painter(timeline)
    spans = [s for rank in range(timeline.num_ranks) for s in timeline.spans(rank) if s.end > s.start]
    computations = [span for span in spans if span.lane is Lane.COMPUTE]
    bars: defaultdict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for span in computations:
        for part, paint in enumerate(painter.parts(span.rank, span.action)):
            bars[paint.fill].append(_bar(span, frame, part if _is_pair(span.action) else None))
    for span in spans:
        if span.lane is Lane.REDUCE:
            bars[REDUCTION.fill].append(_strip(span, frame))
        elif messages and span.lane is Lane.RECEIVE:
            bars[_MESSAGE].append(_upper_strip(span, frame))
    # Thin bars would be all edge.
    narrowest = min((s.end - s.start for s in computations), default=1.0) * points_per_time
    edge = min(0.6, narrowest / 12)
    for colour, polygons in bars.items():
        axes.add_collection(PolyCollection(polygons, facecolors=colour, edgecolors=_EDGE, linewidths=edge))
    _write_numbers(axes, computations, frame, painter)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    _label_ranks(axes, timeline.num_ranks)
    figures = f"makespan {timeline.makespan * scale.factor:.4g} {scale.label}, bubble {timeline.bubble_fraction:.1%}"
    axes.set_title(f"{title}   ·   {figures}" if title else figures)
    axes.tick_params(axis="x", labelbottom=True)


def _bar(span: Span, frame: _Frame, half: int | None) -> list[tuple[float, float]]:
    """Return the corners of a bar; of a pair the forward takes the upper half and the backward the lower one."""
    top, bottom = span.rank - _BAR_HEIGHT / 2, span.rank + _BAR_HEIGHT / 2
    if half is not None:
        top, bottom = (top, span.rank) if half == 0 else (span.rank, bottom)
    return _rectangle(span, frame, top, bottom)


def _strip(span: Span, frame: _Frame) -> list[tuple[float, float]]:
    bottom = span.rank + 0.5
    return _rectangle(span, frame, bottom - _STRIP_HEIGHT, bottom)


def _upper_strip(span: Span, frame: _Frame) -> list[tuple[float, float]]:
    top = span.rank - 0.5
    return _rectangle(span, frame, top, top + _MESSAGE_HEIGHT)


def _rectangle(span: Span, frame: _Frame, top: float, bottom: float) -> list[tuple[float, float]]:
    left, right = frame.x(span.start), frame.x(span.end)
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _write_numbers(axes: "Axes", spans: Sequence[Span], frame: _Frame, painter: Painter) -> None:
    size = min(8.0, _POINTS_PER_IN * _ROW_IN * 0.45)
    room = [(span, (span.end - span.start) * frame.points_per_time / _DIGIT_WIDTH) for span in spans]
    fitting = [(span, min(size, points / (len(_number(span.action)) + 0.7))) for span, points in room]
    # Smaller than this, numbers are dust.
    readable = [(span, points) for span, points in fitting if points >= 4.0 and _number(span.action)]
    if len(readable) > _MOST_LABELS:
        return
    for span, points in readable:
        for part, action in enumerate(_parts(span.action)):
            centre = span.rank if not _is_pair(span.action) else span.rank + (part - 0.5) * _BAR_HEIGHT / 2
            axes.text(
                frame.x((span.start + span.end) / 2),
                centre,
                _number(action),
                fontsize=points if not _is_pair(span.action) else points * 0.75,
                color=painter.paint(span.rank, action).text,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def _parts(instruction: Instruction) -> tuple[Action, ...]:
    return tuple(instruction) if isinstance(instruction, Overlap) else (instruction,)


def _is_pair(instruction: Instruction) -> bool:
    return isinstance(instruction, Overlap)


def _number(instruction: Instruction) -> str:
    if isinstance(instruction, Overlap):
        return max(map(_number, instruction), key=len)
    return "" if instruction.microbatch is None else str(instruction.microbatch)


def _label_ranks(axes: "Axes", num_ranks: int) -> None:
    step = max(1, -(-num_ranks // 64))
    ticks = list(range(0, num_ranks, step))
    axes.set_yticks(ticks, [str(rank) for rank in ticks])
    axes.set_ylabel("rank")


def _draw_memory(axes: "Axes", timeline: Timeline, scale: _Scale) -> None:
    """Draw each rank's memory as a filled step curve in the rank's row, all rows to one scale, with its peak behind."""
    from matplotlib.collections import PolyCollection

    curves = [timeline.memory(rank) for rank in range(timeline.num_ranks)]
    in_bytes = curves[0].unit == "bytes"
    factor, unit = (2.0**-20, "MiB") if in_bytes else (1.0, "activations, units of 1/p of the model")
    peaks = [float(curve.values.max(initial=0.0)) for curve in curves]
    highest = max(peaks) or 1.0
    polygons = []
    for rank, curve in enumerate(curves):
        x = np.repeat((curve.times - timeline.origin) * scale.factor, 2)[1:]
        y = rank + 0.5 - _BAR_HEIGHT * np.repeat(curve.values, 2)[:-1] / highest
        floor = rank + 0.5
        polygons.append([(x[0], floor), *zip(x.tolist(), y.tolist(), strict=True), (x[-1], floor)])
        axes.annotate(
            f"{peaks[rank] * factor:.4g}",
            (1.0, rank + 0.45),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7,
            color=INK,
        )
    axes.add_collection(PolyCollection(polygons, facecolors=_MEMORY_FILL, edgecolors=_MEMORY_LINE, linewidths=0.7))
    axes.set_ylim(timeline.num_ranks - 0.4, -0.5)
    _label_ranks(axes, timeline.num_ranks)
    axes.set_title(f"memory   ·   peak of each rank on the right ({unit})", fontsize=8.5)


def _legend(timelines: Sequence[Timeline], *, messages: bool) -> Iterator[Any]:
    """Yield one patch per kind and route that occurs, in the order of kinds, each in the shade of the first chunk."""
    from matplotlib.patches import Patch

    routes = sorted({route for timeline in timelines for route in timeline.microbatch_to_route} or {0})
    seen: dict[tuple[Kind, int], str] = {}
    reduces = chunks = False
    for timeline in timelines:
        painter = Painter(timeline)
        chunks |= painter.has_chunks
        for rank in range(timeline.num_ranks):
            for span in timeline.spans(rank):
                reduces |= span.lane is Lane.REDUCE
                for action in _parts(span.action):
                    if action.kind in _WORDS and action.microbatch is not None:
                        key = action.kind, painter.route_of(action.microbatch)
                        if painter.is_first_chunk(rank, action):
                            seen.setdefault(key, painter.paint(rank, action).fill)
    for (kind, route), colour in sorted(seen.items()):
        suffix = f", route {route}" if len(routes) > 1 else ""
        yield Patch(facecolor=colour, label=_WORDS[kind] + suffix)
    if chunks:
        yield Patch(facecolor="none", label="darker: a later chunk of the rank")
    if reduces:
        yield Patch(facecolor=REDUCTION.fill, label="gradient reduction")
    if messages and any((timeline.lane == Lane.RECEIVE).any() for timeline in timelines):
        yield Patch(facecolor=_MESSAGE, label="message under way to the rank")
