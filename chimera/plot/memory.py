"""``plot_memory``: what every rank holds over a step, its activations above what stays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from chimera.plan.estimate import Estimate
from chimera.plot.figure import INK, check_paths, new_figure, save, settings

__all__ = ["plot_memory"]

_GIB: Final = 2**30
_STAYS: Final = "#b9c4d0"
_ACTIVATIONS: Final = "#3276bd"
_LIMIT: Final = "#b5305c"
_MOST_PANELS: Final = 8
"""Ranks that are drawn; of more, evenly spaced ones with the first and the last."""


def plot_memory(estimate: Estimate, path: str | Path | Sequence[str | Path]) -> tuple[int, ...]:
    """Draw the memory of ranks over time into PDF, PNG or SVG files.

    Returns:
        The ranks that are drawn.

    Raises:
        UsageError: a suffix names no format.
    """
    paths = check_paths(path)
    timeline, limit = estimate.timeline, estimate.cluster.device.memory_bytes / _GIB
    count = len(estimate.memory)
    ranks = sorted({round(i) for i in np.linspace(0, count - 1, min(count, _MOST_PANELS))})
    with settings():
        figure = new_figure(7.0, 0.9 + 0.85 * len(ranks))
        panels = figure.subplots(len(ranks), 1, sharex=True, sharey=True, squeeze=False).ravel()
        for panel, rank in zip(panels, ranks, strict=True):
            memory, curve = estimate.memory[rank], timeline.memory(rank)
            stays = (memory.total - memory.activations) / _GIB
            held = stays + curve.values / _GIB
            panel.fill_between(curve.times - timeline.origin, 0, stays, color=_STAYS, linewidth=0)
            panel.fill_between(curve.times - timeline.origin, stays, held, step="post", color=_ACTIVATIONS, linewidth=0)
            panel.axhline(limit, color=_LIMIT, linewidth=0.9)
            panel.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", color=INK)
        title = f"GiB: activations above all that stays; the line is the device's {limit:.1f}"
        shown = estimate.schedule.num_microbatches * estimate.schedule.microbatch_share
        if shown != estimate.layout.microbatches:
            title += f"\nthe steady state is cut short: {shown:g} of {estimate.layout.microbatches} micro-batches"
        panels[0].set_title(title)
        panels[0].set_xlim(0, timeline.finish - timeline.origin)
        panels[0].set_ylim(0, max(limit, estimate.peak_bytes / _GIB) * 1.08)
        panels[-1].set_xlabel("seconds since the first forward")
        save(figure, paths)
    return tuple(ranks)
