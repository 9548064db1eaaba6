"""``chimera simulate``: predicts one step and says where its time goes.

The timeline, the causes of its gaps and its critical path come from ``chimera.simulate``; here they become a page.
"""

import json as json_form
import sys
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from chimera.cli.facts import counted, number, sizes_text, step_facts, units_text
from chimera.cli.options import (
    CostOptions,
    FileOption,
    Flag,
    ReduceOption,
    ScheduleName,
    SizeOptions,
    load_schedule,
    with_reductions,
)
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.ir.action import Kind, flatten
from chimera.ir.checks import check
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Span, Timeline
from chimera.plot import plot_timeline
from chimera.simulate import Cause, critical_path, gaps, idle_by_cause, simulate
from chimera.timeline.trace import write_trace

__all__ = ["CAUSE_HEADINGS", "path_text", "simulate_command"]

CAUSE_HEADINGS = {
    Cause.WARM_UP: "warm-up",
    Cause.WAITING: "waiting",
    Cause.COMMUNICATION: "message",
    Cause.REDUCTION: "reduction",
    Cause.DRAIN: "drain",
    Cause.OVERHEAD: "overhead",
}


def simulate_command(
    name: ScheduleName,
    sizes: SizeOptions,
    costs: CostOptions,
    *,
    reduce: ReduceOption = None,
    json: Flag = False,
    trace: FileOption = None,
    out: FileOption = None,
) -> None:
    """Predict one step: time on both clocks, idle share, memory, the cause of every gap, the critical path.

    Example:
        chimera simulate chimera --ranks 8 --microbatches 8 --p2p 0.1

    Args:
        name: a schedule's name, or a file
        sizes: of a schedule given by NAME; a FILE has its own
        costs: in units of 1/p of the model for one micro-batch, or a FILE in seconds and bytes
        reduce: where gradient reductions start (default: end, if they take time)
        json: print a JSON document instead
        trace: also write a trace for Perfetto or chrome://tracing into FILE
        out: also draw the timeline into FILE (.pdf, .png or .svg)
    """
    model = costs.resolve()
    schedule = with_reductions(load_schedule(name, sizes, model), model, reduce)
    check(schedule)
    timeline = simulate(schedule, model)
    # A module without an overlapped form runs a pair's forward, then its backward.
    apart = simulate(schedule, model, pairs_together=False).makespan if schedule.table.paired.any() else None
    if out is not None:
        plot_timeline([(schedule.name, timeline)], out)
        print(f"wrote {out}", file=sys.stderr)
    if trace is not None:
        write_trace(timeline, trace)
        print(f"wrote {trace}", file=sys.stderr)
    idle = idle_by_cause(gaps(schedule, timeline, model), schedule.num_ranks)
    path = critical_path(schedule, timeline, model)
    if json:
        print(json_form.dumps(_as_dict(schedule, timeline, apart, idle, path), indent=1, ensure_ascii=False))
    else:
        _print_page(schedule, timeline, apart, idle, path)


def _print_page(
    schedule: Schedule,
    timeline: Timeline,
    apart: float | None,
    idle: Mapping[Cause, NDArray[np.float64]],
    path: list[Span],
) -> None:
    out = console()
    peaks = timeline.peak_activations
    out.print(f"{schedule.name}, {sizes_text(schedule)}", style="bold")
    facts = {
        "makespan": f"{number(timeline.makespan)}, first start to last end over all ranks",
        "span": f"{number(timeline.span)}, the longest of a rank's own first start to last end",
        "bubble": f"{timeline.bubble_fraction:.1%} of total, {timeline.bubble_over_ideal:.1%} of ideal",
        "activations": f"{number(min(peaks))} to {number(max(peaks))} at the peak of a rank",
    }
    if apart is not None:
        facts["pairs apart"] = f"makespan {number(apart)}, if each pair runs its forward, then its backward"
    if timeline.peak_bytes is not None:
        facts["memory"] = (
            f"{_gib(min(timeline.peak_bytes))} to {_gib(max(timeline.peak_bytes))} GiB at the peak of a rank"
        )
    for label, text in {**facts, "critical path": path_text(timeline, path)}.items():
        print_wrapped(out, text, indent=" " * 16, first=f"  {label:13} ")
    out.print()
    print_table(out, *_rank_table(timeline, idle))
    out.print()
    print_wrapped(out, units_text(timeline.unit))


def _rank_table(timeline: Timeline, idle: Mapping[Cause, NDArray[np.float64]]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: busy and idle time of each rank, the idle time by its causes, the peaks of memory."""
    causes = [cause for cause in Cause if idle[cause].any()]
    columns = {
        "rank": [str(rank) for rank in range(timeline.num_ranks)],
        "busy": [number(time) for time in timeline.busy.tolist()],
        "idle": [number(time) for time in (timeline.makespan - timeline.busy).tolist()],
        **{CAUSE_HEADINGS[cause]: [number(time) for time in idle[cause].tolist()] for cause in causes},
        "peak\nactiv.": [number(peak) for peak in timeline.peak_activations],
    }
    if timeline.peak_bytes is not None:
        columns["peak\nGiB"] = [_gib(peak) for peak in timeline.peak_bytes]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def path_text(timeline: Timeline, path: list[Span]) -> str:
    """Say what the critical path is made of."""
    parts = [f"{counted(count, noun)} ({number(time)})" for noun, (count, time) in _path_parts(path).items()]
    between = timeline.makespan - sum(span.end - span.start for span in path)
    if between > 1e-9 * timeline.makespan:
        parts.append(f"messages ({number(between)})")
    ends = [f"{span.action} on rank {span.rank}" for span in (path[0], path[-1])]
    return f"{' + '.join(parts)} = {number(timeline.makespan)}, from {ends[0]} to {ends[1]}"


_NOUNS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.REDUCE_GRAD: "reduction",
    Kind.STEP: "step",
}


def _path_parts(path: list[Span]) -> dict[str, tuple[int, float]]:
    """Return number and time of the path's spans by what they are."""
    parts: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for span in path:
        kinds = [action.kind for action in flatten([span.action])]
        # A pair is one span of two actions.
        noun = "pair" if len(kinds) == 2 else _NOUNS.get(kinds[0], "message")
        count, time = parts[noun]
        parts[noun] = (count + 1, time + span.end - span.start)
    return dict(parts)


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.2f}"


def _as_dict(
    schedule: Schedule,
    timeline: Timeline,
    apart: float | None,
    idle: Mapping[Cause, NDArray[np.float64]],
    path: list[Span],
) -> dict[str, object]:
    return {
        "schedule": schedule.name,
        **step_facts(schedule, timeline),
        "makespan_pairs_apart": apart,
        "busy": timeline.busy.tolist(),
        "idle": {cause.value: idle[cause].tolist() for cause in Cause},
        "peak_activations": list(timeline.peak_activations),
        "peak_bytes": None if timeline.peak_bytes is None else list(timeline.peak_bytes),
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end} for span in path
        ],
    }
