"""``plot_validation``: predicted against published figures, one panel per table, with the lines of ±5 and ±10 %."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from chimera.plan.comparison import TableResult
from chimera.plot.figure import check_paths, new_figure, save, settings

__all__ = ["plot_validation"]

_POINT: Final = "#3276bd"
_LINE: Final = "#7a7a7a"
_PANELS_WIDE: Final = 3


def plot_validation(results: Sequence[TableResult], path: str | Path | Sequence[str | Path]) -> None:
    """Draw every table's figures into PDF, PNG or SVG files.

    Raises:
        UsageError: a suffix names no format.
    """
    paths = check_paths(path)
    wide = min(len(results), _PANELS_WIDE)
    high = -(-len(results) // wide)
    with settings():
        figure = new_figure(3.4 * wide, 3.3 * high)
        panels = figure.subplots(high, wide, squeeze=False).ravel()
        for panel in panels[len(results) :]:
            panel.set_axis_off()
        for panel, result in zip(panels, results, strict=False):
            _draw(panel, result)
        save(figure, paths)


def _draw(axes: Any, result: TableResult) -> None:
    published = np.array([row.published for row in result.rows])
    predicted = np.array([row.predicted for row in result.rows])
    ends = np.array([min(published.min(), predicted.min()) * 0.8, max(published.max(), predicted.max()) * 1.25])
    for percent, width in ((0, 0.9), (5, 0.5), (10, 0.5)):
        for sign in (-1, 1):
            axes.plot(ends, ends * (1 + sign * percent / 100), color=_LINE, linewidth=width, zorder=1)
    axes.scatter(published, predicted, s=9, color=_POINT, linewidths=0, zorder=2)
    errors = result.errors
    axes.set(
        title=f"{result.table}: mean {errors.mean_pct:.1f} %, max {errors.max_pct:.1f} %",
        xlabel=f"published, {result.unit}",
        ylabel=f"predicted, {result.unit}",
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
    )
