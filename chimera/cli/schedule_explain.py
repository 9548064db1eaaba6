"""``chimera schedule explain``: where each rank's idle time comes from, and what would remove it.

The causes and the critical path come from ``chimera.simulate``, what would remove the idle time from trying it in
``cli.remedies``; here they become a page.
"""

import json as json_form
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from chimera.cli.facts import number, sizes_text, step_facts, units_text
from chimera.cli.options import (
    CostOptions,
    Flag,
    ReduceOption,
    ScheduleName,
    SizeOptions,
    Sizes,
    load_schedule,
    with_reductions,
)
from chimera.cli.remedies import Family, Refusal, Remedy, Subject, family_of, remedies
from chimera.cli.simulate import CAUSE_HEADINGS, path_text
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.ir.action import Kind
from chimera.ir.checks import check
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Span, Timeline
from chimera.passes.derived import compute_only
from chimera.schedules import SCHEDULES
from chimera.simulate import Cause, Gap, critical_path, gaps, idle_by_cause, simulate

__all__ = ["schedule_explain"]

_LEAST_GAIN = 5e-4
"""Idle shares are printed to a tenth of a percent; a change that gives no more than this is no help."""


def schedule_explain(
    name: ScheduleName,
    sizes: SizeOptions,
    costs: CostOptions,
    *,
    reduce: ReduceOption = None,
    json: Flag = False,
) -> None:
    """Say for each rank where idle time comes from, and what would remove it: every change is tried and simulated.

    Tried are twice the micro-batches, half the ranks, a finer cut, split backward and twice the memory.

    Example:
        chimera schedule explain 1f1b --ranks 8 --microbatches 8

    Args:
        name: a schedule's name, or a file
        sizes: of a schedule given by NAME; a FILE has its own
        costs: in units of 1/p of the model for one micro-batch, or a FILE in seconds and bytes
        reduce: where gradient reductions start (default: end, if they take time)
        json: print a JSON document instead
    """
    model = costs.resolve()
    given = load_schedule(name, sizes, model)
    schedule = with_reductions(given, model, reduce)
    check(schedule)
    timeline = simulate(schedule, model)
    found = gaps(schedule, timeline, model)
    path = critical_path(schedule, timeline, model)
    bare = compute_only(given)
    family = _named(name, sizes) if name in SCHEDULES else family_of(bare, model)
    subject = Subject(bare, model, reduce, family, timeline.bubble_fraction)
    tried = list(remedies(subject)) if subject.idle > 0 else []
    if json:
        print(json_form.dumps(_as_dict(schedule, timeline, found, path, tried), indent=1, ensure_ascii=False))
    else:
        _print_page(schedule, timeline, found, path, tried)


def _named(name: str, sizes: Sizes) -> Family:
    """Return the family that was asked for, with the options that were given."""
    given = {option: getattr(sizes, option) for option in SCHEDULES[name].options if option != "costs"}
    return Family(name, {option: value for option, value in given.items() if value is not None})


def _print_page(
    schedule: Schedule, timeline: Timeline, found: Sequence[Gap], path: list[Span], tried: Sequence[Remedy | Refusal]
) -> None:
    out = console()
    idle = idle_by_cause(found, schedule.num_ranks)
    total = sum(float(times.sum()) for times in idle.values())
    out.print(f"{schedule.name}, {sizes_text(schedule)}", style="bold")
    shares = [f"{cause.value} {float(idle[cause].sum()) / total:.0%}" for cause in Cause if total and idle[cause].any()]
    facts = {
        "makespan": number(timeline.makespan),
        "idle": f"{timeline.bubble_fraction:.1%} of total" + (f": {', '.join(shares)}" if shares else ""),
        "critical path": path_text(timeline, path),
    }
    for label, text in facts.items():
        print_wrapped(out, text, indent=" " * 16, first=f"  {label:13} ")
    out.print()
    print_table(out, *_rank_table(timeline, found, path))
    out.print()
    _print_remedies(timeline, tried)
    print_wrapped(out, units_text(timeline.unit))


def _rank_table(timeline: Timeline, found: Sequence[Gap], path: list[Span]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: a rank's idle time by cause, its time on the critical path, what it waits for most."""
    num_ranks = timeline.num_ranks
    idle = idle_by_cause(found, num_ranks)
    on_path = _time_on_path(path, num_ranks)
    columns = {
        "rank": [str(rank) for rank in range(num_ranks)],
        "on\npath": [number(time) for time in on_path],
        "idle": [number(time) for time in (timeline.makespan - timeline.busy).tolist()],
        **{
            CAUSE_HEADINGS[cause]: [number(time) for time in times.tolist()]
            for cause, times in idle.items()
            if times.any()
        },
        "waits most for": [_text_of_longest(_awaited(found, rank)) for rank in range(num_ranks)],
    }
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _time_on_path(path: Iterable[Span], num_ranks: int) -> list[float]:
    """Return the time of the path's computations and reductions on each rank; a message is no work of a rank."""
    times = np.zeros(num_ranks)
    for span in path:
        if span.lane in {Lane.COMPUTE, Lane.REDUCE}:
            times[span.rank] += span.end - span.start
    held: list[float] = times.tolist()
    return held


def _awaited(found: Iterable[Gap], rank: int) -> dict[tuple[Kind, int], float]:
    """Return how long a rank waits for each kind of each other rank, their messages included, the longest first."""
    times: defaultdict[tuple[Kind, int], float] = defaultdict(float)
    for gap in found:
        if gap.rank == rank and gap.awaited is not None and gap.awaited_rank is not None:
            times[gap.awaited.kind, gap.awaited_rank] += gap.end - gap.start
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _text_of_longest(awaited: dict[tuple[Kind, int], float]) -> str:
    if not awaited:
        return "-"
    (kind, rank), time = next(iter(awaited.items()))
    return f"{kind.name} on rank {rank}: {number(time)}"


def _print_remedies(timeline: Timeline, tried: Sequence[Remedy | Refusal]) -> None:
    """Print the changes that help, the greatest first, then in a line each those that do not or cannot be made."""
    out = console()
    made = [each for each in tried if isinstance(each, Remedy)]
    helping = sorted((each for each in made if each.gain > _LEAST_GAIN), key=lambda each: each.idle)
    if helping:
        now = ["now", f"{timeline.bubble_fraction:.1%}", number(timeline.makespan)]
        rows = [[*now, number(max(timeline.peak_activations))]]
        rows += [
            [each.change, f"{each.idle:.1%}", number(each.makespan), number(each.peak_activations)] for each in helping
        ]
        print_table(out, ("what would remove it", "idle", "makespan", "peak\nactiv."), rows)
        for each in helping:
            print_wrapped(out, f"{each.change}: {each.schedule}", indent="    ", first="  ")
    if useless := [f"{each.change} (idle {each.idle:.1%})" for each in made if each not in helping]:
        print_wrapped(out, f"no help: {', '.join(useless)}", "    ", "  ")
    for refusal in (each for each in tried if isinstance(each, Refusal)):
        print_wrapped(out, f"cannot be tried: {refusal.change}: {refusal.reason}", "    ", "  ")
    if tried:
        out.print()


def _as_dict(
    schedule: Schedule, timeline: Timeline, found: Sequence[Gap], path: list[Span], tried: Sequence[Remedy | Refusal]
) -> dict[str, object]:
    idle = idle_by_cause(found, schedule.num_ranks)
    on_path = _time_on_path(path, schedule.num_ranks)
    return {
        "schedule": schedule.name,
        **step_facts(schedule, timeline),
        "most_peak_activations": max(timeline.peak_activations),
        "per_rank": [
            {
                "rank": rank,
                "on_critical_path": on_path[rank],
                "idle": {cause.value: float(idle[cause][rank]) for cause in Cause},
                "waits_for": [
                    {"kind": kind.name, "rank": other, "time": time}
                    for (kind, other), time in _awaited(found, rank).items()
                ],
            }
            for rank in range(schedule.num_ranks)
        ],
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end} for span in path
        ],
        "remedies": [
            {
                "change": each.change,
                "schedule": each.schedule,
                "bubble_of_total": each.idle,
                "gain": each.gain,
                "makespan": each.makespan,
                "most_peak_activations": each.peak_activations,
            }
            for each in tried
            if isinstance(each, Remedy)
        ],
        "cannot_be_tried": [
            {"change": each.change, "reason": each.reason} for each in tried if isinstance(each, Refusal)
        ],
    }
