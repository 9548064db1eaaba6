"""``plot_curve``: a quantity over training steps, with horizontal reference lines such as the unigram entropy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from chimera.errors import UsageError
from chimera.plot.figure import check_paths, new_figure, save, settings

__all__ = ["Series", "plot_curve"]

Series = tuple[Sequence[float], Sequence[float]]
"""Steps and values, of equal length."""

_COLOURS: Final = ("#3276bd", "#bd7132", "#3f8f5f", "#8250a8", "#7a7a7a")
_REFERENCE: Final = "#b5305c"
_POINTS_WITH_MARKERS: Final = 60
_SMOOTH_POINTS: Final = 400
"""A curve of more points is noise at its width; thin lines keep it readable."""


def plot_curve(
    series: Mapping[str, Series],
    path: str | Path | Sequence[str | Path],
    *,
    title: str = "",
    x_label: str = "step",
    y_label: str = "loss",
    references: Mapping[str, float] | None = None,
    width_in: float = 7.0,
    height_in: float = 4.0,
) -> None:
    """Draw curves into PDF, PNG or SVG files.

    Args:
        series: steps and values by label; a curve of few points also shows them.
        path: one path, or several for the same figure in several formats.
        title: above the figure.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        references: horizontal lines by label.
        width_in: of the figure.
        height_in: of the figure.

    Raises:
        UsageError: no curve, a curve without a point or with as many values as not steps, or a suffix that names no
            format.
    """
    paths = check_paths(path)
    if not series:
        raise UsageError("no curve to draw; needed: at least one")
    for label, (steps, values) in series.items():
        if not len(steps) or len(steps) != len(values):
            raise UsageError(
                f"curve {label!r} has {len(steps)} steps and {len(values)} values; needed: as many of each"
            )
    with settings():
        figure = new_figure(width_in, height_in)
        axes = figure.subplots()
        for number, (label, (steps, values)) in enumerate(series.items()):
            marker = "o" if len(steps) <= _POINTS_WITH_MARKERS else ""
            colour = _COLOURS[number % len(_COLOURS)]
            width = 1.4 if len(steps) <= _SMOOTH_POINTS else 0.8
            axes.plot(steps, values, label=label, color=colour, linewidth=width, marker=marker, markersize=3)
        for label, value in (references or {}).items():
            axes.axhline(value, color=_REFERENCE, linewidth=1.0, linestyle=(0, (5, 3)))
            axes.annotate(
                f"{label} {value:.3g}",
                (1.0, value),
                xycoords=("axes fraction", "data"),
                xytext=(-2, 3),
                textcoords="offset points",
                ha="right",
                color=_REFERENCE,
                fontsize=8,
            )
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.margins(x=0.01)
        axes.grid(linewidth=0.3, color="#cccccc")
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
        save(figure, paths)
