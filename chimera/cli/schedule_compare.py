"""``chimera schedule compare``: the same sizes and costs for several schedules, one row each.

The numbers are the simulator's and the schedule's own; this module only sets them side by side.
"""

import json as json_form
import sys
from typing import Annotated

from tyro.conf import Positional, arg

from chimera.cli.facts import (
    bytes_per_rank,
    messages_per_rank,
    number,
    step_facts,
    units_text,
    weight_copies,
)
from chimera.cli.options import (
    CostOptions,
    FileOption,
    Flag,
    ReduceOption,
    SizeOptions,
    load_schedule,
    sizes_for,
    with_reductions,
)
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.ir.checks import check
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.plot import plot_timeline
from chimera.simulate import simulate

__all__ = ["schedule_compare"]

_HEADINGS = (
    "schedule",
    "makespan",
    "span",
    "bubble,\ntotal",
    "bubble,\nideal",
    "peak\nactiv.",
    "weight\ncopies",
    "messages\nper rank",
    "sync",
)
_BYTES_HEADING = "MiB\nsent"
_LEGEND = (
    "Bubble: idle time as a share of the total and of the ideal time. Peak activations: of the ranks that hold least "
    "and most. Weight copies: on one rank, with all versions of an asynchronous schedule. Messages: sent by the "
    "busiest rank. Sync: one optimizer step after all micro-batches."
)


def schedule_compare(
    names: Annotated[tuple[str, ...], Positional, arg(metavar="NAME|FILE...", help_behavior_hint="")],
    sizes: SizeOptions,
    costs: CostOptions,
    *,
    reduce: ReduceOption = None,
    json: Flag = False,
    out: FileOption = None,
) -> None:
    """Set schedules side by side: time, idle share, memory and messages.

    --chunks, --pairs, --unit, --waves, --updates and --memory-limit go to the schedules that take them.

    Example:
        chimera schedule compare gpipe 1f1b interleaved chimera --ranks 8 --microbatches 8 --chunks 2

    Args:
        names: schedules' names, or files
        sizes: of a schedule given by NAME; a FILE has its own
        costs: in units of 1/p of the model for one micro-batch, or a FILE in seconds and bytes
        reduce: where gradient reductions start (default: end, if they take time)
        json: print a JSON list instead
        out: also draw all timelines, one under the other with their memory beneath, into FILE (.pdf, .png or .svg)
    """
    if not names:
        raise UsageError("compare needs a schedule; try: compare gpipe 1f1b chimera --ranks 8 --microbatches 8")
    model = costs.resolve()
    loaded = [load_schedule(name, own, model) for name, own in zip(names, sizes_for(names, sizes), strict=True)]
    schedules = [with_reductions(schedule, model, reduce) for schedule in loaded]
    for schedule in schedules:
        check(schedule)
    timelines = [simulate(schedule, model) for schedule in schedules]
    if out is not None:
        plot_timeline(list(zip(names, timelines, strict=True)), out, memory=True)
        print(f"wrote {out}", file=sys.stderr)
    sent = [bytes_per_rank(schedule, model) for schedule in schedules]
    if json:
        facts = [_as_dict(*each) for each in zip(names, schedules, timelines, sent, strict=True)]
        print(json_form.dumps(facts, indent=1, ensure_ascii=False))
    else:
        rows = [_cells(*each) for each in zip(names, schedules, timelines, sent, strict=True)]
        headings = _HEADINGS if None in sent else (*_HEADINGS, _BYTES_HEADING)
        terminal = console()
        print_table(terminal, headings, rows)
        terminal.print()
        print_wrapped(terminal, f"{units_text(timelines[0].unit)} {_LEGEND}")


def _cells(name: str, schedule: Schedule, timeline: Timeline, sent: tuple[float, ...] | None) -> list[str]:
    peaks = timeline.peak_activations
    cells = [
        name,
        number(timeline.makespan),
        number(timeline.span),
        f"{timeline.bubble_fraction:.1%}",
        f"{timeline.bubble_over_ideal:.1%}",
        f"{number(min(peaks))}…{number(max(peaks))}",
        number(weight_copies(schedule)),
        number(max(messages_per_rank(schedule))),
        "no" if schedule.is_asynchronous else "yes",
    ]
    return cells if sent is None else [*cells, number(max(sent) / 2**20)]


def _as_dict(name: str, schedule: Schedule, timeline: Timeline, sent: tuple[float, ...] | None) -> dict[str, object]:
    peaks = timeline.peak_activations
    return {
        "schedule": name,
        **step_facts(schedule, timeline),
        "least_peak_activations": min(peaks),
        "most_peak_activations": max(peaks),
        "weight_copies": weight_copies(schedule),
        "messages_per_rank": max(messages_per_rank(schedule)),
        "bytes_per_rank": None if sent is None else max(sent),
        "synchronous": not schedule.is_asynchronous,
    }
