"""``chimera schedule show``: one schedule in time, in the terminal or as a figure.

The picture is ``timeline.grid``'s or ``plot``'s; this module chooses its width and says the figures that go with it.
"""

import sys
from typing import Annotated

from tyro.conf import arg

from chimera.cli.facts import number, sizes_text
from chimera.cli.options import CostOptions, FileOption, ScheduleName, SizeOptions, load_schedule
from chimera.cli.terminal import console
from chimera.errors import UsageError
from chimera.ir.checks import check
from chimera.plot import plot_timeline
from chimera.simulate import simulate
from chimera.timeline.grid import draw_grid

__all__ = ["schedule_show"]

_PIPED = 160
"""Columns where the output is no terminal."""


def schedule_show(
    name: ScheduleName,
    sizes: SizeOptions,
    costs: CostOptions,
    *,
    columns: Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")] = None,
    out: FileOption = None,
) -> None:
    """Draw a schedule in time: one row per rank, one number per micro-batch, colours by route.

    Example:
        chimera schedule show chimera --ranks 8 --microbatches 8

    Args:
        name: a schedule's name, or a file
        sizes: of a schedule given by NAME; a FILE has its own
        costs: in units of 1/p of the model for one micro-batch, or a FILE in seconds and bytes
        columns: width of the drawing (default: the terminal's; 160 where there is none)
        out: draw into FILE (.pdf, .png or .svg) instead
    """
    if columns is not None and columns < 1:
        raise UsageError(f"--columns {columns}: needed: at least 1")
    model = costs.resolve()
    schedule = load_schedule(name, sizes, model)
    check(schedule)
    timeline = simulate(schedule, model)
    if out is not None:
        plot_timeline([(f"{schedule.name}, {sizes_text(schedule)}", timeline)], out)
        print(f"wrote {out}", file=sys.stderr)
        return
    terminal = console()
    terminal.print(f"{schedule.name}, {sizes_text(schedule)}", style="bold")
    grid = draw_grid(timeline, columns=columns or (terminal.width if terminal.is_terminal else _PIPED))
    terminal.print(grid.rich() if terminal.is_terminal else grid.plain())
    peaks = timeline.peak_activations
    terminal.print(
        f"makespan {number(timeline.makespan)}, bubble {timeline.bubble_fraction:.1%} of total, "
        f"{timeline.bubble_over_ideal:.1%} of ideal, peak activations {number(min(peaks))}…{number(max(peaks))}"
    )
