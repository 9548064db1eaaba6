"""``chimera schedule check``: asks ``ir.checks`` and says in words what was proved. It checks nothing itself."""

import json as json_form
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from chimera.cli.facts import counted, num_channels, number, sizes_text
from chimera.cli.options import (
    CostOptions,
    Flag,
    ReduceOption,
    ScheduleName,
    SizeOptions,
    costs_to_build,
    load_schedule,
    refuse_second_reductions,
)
from chimera.cli.terminal import console, print_wrapped
from chimera.errors import UsageError
from chimera.ir.action import BACKWARDS, COMMUNICATIONS, COMPUTATIONS, SENDS, Kind
from chimera.ir.checks import check
from chimera.ir.memory import peak_activations
from chimera.ir.rows import code_mask
from chimera.ir.schedule import Schedule
from chimera.ir.versions import updates_of_microbatches, weight_versions
from chimera.passes.lower import lower

__all__ = ["schedule_check"]


def schedule_check(
    name: ScheduleName,
    sizes: SizeOptions,
    costs: CostOptions,
    *,
    lowered: Flag = False,
    reduce: ReduceOption = None,
    json: Flag = False,
) -> None:
    """Prove a schedule, or name every broken rule with its rank, position and action.

    Example:
        chimera schedule check chimera --ranks 8 --microbatches 16 --lowered

    Args:
        name: a schedule's name, or a file
        sizes: of a schedule given by NAME; a FILE has its own. --memory-limit is proved of any schedule
        costs: of a schedule that is made for costs (zb-1p, zb-2p)
        lowered: add sends, receives and gradient reductions, and prove the program with them
        reduce: where gradient reductions start in the lowered program (default: end)
        json: print a JSON document instead
    """
    made_for = costs_to_build(name, costs)
    memory_limit = sizes.memory_limit
    if made_for is None:
        sizes = replace(sizes, memory_limit=None)
    schedule = load_schedule(name, sizes, made_for)
    check(schedule, memory_limit=memory_limit)
    if reduce is not None and not lowered:
        raise UsageError(f"--reduce {reduce} places reductions in the lowered program; add --lowered")
    refuse_second_reductions(schedule, reduce)
    if lowered and not schedule.is_lowered:
        schedule = lower(schedule, reduce=reduce or "end")
        check(schedule, memory_limit=memory_limit)
    if json:
        print(json_form.dumps(_as_dict(schedule, memory_limit), indent=1, ensure_ascii=False))
        return
    out = console()
    out.print(f"{schedule.name}, {sizes_text(schedule)}: proved", style="bold")
    for label, text in _proved(schedule, memory_limit).items():
        print_wrapped(out, text, indent=" " * 14, first=f"  {label:11} ")


def _proved(schedule: Schedule, memory_limit: float | None) -> dict[str, str]:
    """Say what holds of a schedule that was checked, with the counts that it was checked on."""
    table = schedule.table
    count = _by_kind(table.kind)
    kinds = ((Kind.F, "forward"), (Kind.B, "backward"), (Kind.I, "split backward"))
    work = ", ".join(counted(count[kind], noun) for kind, noun in kinds if count[kind])
    said = {
        "complete": f"{work}, each once, on the rank that its route names",
        "in order": "each forward before its backward on every rank",
        "messages": "the schedule has none; --lowered adds them and proves their order",
    }
    if schedule.is_lowered:
        said["messages"] = (
            f"{counted(int(code_mask(table, *SENDS).sum()), 'send')}, each with its receive, in the same order at both "
            f"ends of {counted(num_channels(schedule), 'channel')}"
        )
    if count[Kind.REDUCE_GRAD]:
        said["reductions"] = (
            f"{counted(count[Kind.REDUCE_GRAD], 'reduction')}, of every replica's gradients, in the same order on "
            "ranks that share them"
        )
    if schedule.is_lowered:
        collectives = _collectives(_by_kind(table.kind[_between(schedule)]))
        said["collectives"] = (
            f"{_reductions_text(collectives.pop(Kind.REDUCE_GRAD), count[Kind.REDUCE_GRAD])} between a rank's first "
            "forward and its last backward, and no other collective; layers that ranks share add their own inside F "
            "and B"
        )
        assert not any(collectives.values()), "no other kind of action is a collective"
    if schedule.is_asynchronous:
        said["updates"] = (
            f"{max(updates_of_microbatches(schedule)) + 1} of every stage, each micro-batch's gradients in the same "
            "one on all of them, on weights that are there when its forward takes them"
        )
    limit = "no limit given" if memory_limit is None else f"limit {number(memory_limit)}"
    said["not stuck"] = f"all {counted(schedule.num_ranks, 'program')} run to their end"
    said["memory"] = f"at most {number(max(peak_activations(schedule)))} units of activations on a rank ({limit})"
    if schedule.is_asynchronous:
        most = max(max(versions.values()) for versions in weight_versions(schedule))
        said["memory"] += f", and {counted(most, 'version')} of a stage's weights"
    return said


def _reductions_text(between: int, everywhere: int) -> str:
    """Say how many of the reductions start there.

    >>> _reductions_text(4, 8), _reductions_text(0, 8), _reductions_text(0, 0)
    ('4 of 8 reductions', 'none of 8 reductions', 'no reduction')
    """
    return f"{between or 'none'} of {counted(everywhere, 'reduction')}" if everywhere else "no reduction"


def _by_kind(kinds: NDArray[np.uint8]) -> dict[Kind, int]:
    return dict(zip(Kind, np.bincount(kinds, minlength=len(Kind)).tolist(), strict=True))


def _collectives(count: dict[Kind, int]) -> dict[Kind, int]:
    """Return the counts of kinds that several ranks do together: no computation, message or update is that."""
    alone = COMPUTATIONS | COMMUNICATIONS | {Kind.STEP}
    return {kind: number_of for kind, number_of in count.items() if kind not in alone}


def _between(schedule: Schedule) -> NDArray[np.bool_]:
    """Return which rows of the table stand between their rank's first forward and its last backward."""
    table = schedule.table
    found = np.zeros(len(table.kind), np.bool_)
    forwards, backwards = code_mask(table, Kind.F), code_mask(table, *BACKWARDS)
    for begin, end in zip(table.offsets[:-1].tolist(), table.offsets[1:].tolist(), strict=True):
        if forwards[begin:end].any() and backwards[begin:end].any():
            first = begin + int(np.argmax(forwards[begin:end]))
            last = end - 1 - int(np.argmax(backwards[begin:end][::-1]))
            found[first : last + 1] = True
    return found


def _as_dict(schedule: Schedule, memory_limit: float | None) -> dict[str, object]:
    between = _by_kind(schedule.table.kind[_between(schedule)])
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "stages": schedule.num_stages,
        "routes": len(schedule.placement.routes),
        "proved": True,
        "lowered": schedule.is_lowered,
        "actions": {kind.name: number_of for kind, number_of in _by_kind(schedule.table.kind).items()},
        "between_first_forward_and_last_backward": {kind.name: number_of for kind, number_of in between.items()},
        "collectives_between": {kind.name: number_of for kind, number_of in _collectives(between).items()},
        "channels": num_channels(schedule),
        "peak_activations": max(peak_activations(schedule)),
        "memory_limit": memory_limit,
    }
