"""``chimera schedule check``: asks ``ir.checks`` and says in words what was proved. It checks nothing itself."""

from dataclasses import replace

import numpy as np

from chimera.cli.facts import counted, num_channels, number, sizes_text
from chimera.cli.options import CostOptions, Flag, ScheduleName, SizeOptions, costs_to_build, load_schedule
from chimera.cli.terminal import console, print_wrapped
from chimera.ir.action import SENDS, Kind
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
) -> None:
    """Prove a schedule, or name every broken rule with its rank, position and action.

    Example:
        chimera schedule check chimera --ranks 8 --microbatches 16 --lowered

    Args:
        name: a schedule's name, or a file
        sizes: of a schedule given by NAME; a FILE has its own. --memory-limit is proved of any schedule
        costs: of a schedule that is made for costs (zb-1p, zb-2p)
        lowered: add sends, receives and gradient reductions, and prove the program with them
    """
    made_for = costs_to_build(name, costs)
    memory_limit = sizes.memory_limit
    if made_for is None:
        sizes = replace(sizes, memory_limit=None)
    schedule = load_schedule(name, sizes, made_for)
    check(schedule, memory_limit=memory_limit)
    if lowered and not schedule.is_lowered:
        schedule = lower(schedule)
        check(schedule, memory_limit=memory_limit)
    out = console()
    out.print(f"{schedule.name}, {sizes_text(schedule)}: proved", style="bold")
    for label, text in _proved(schedule, memory_limit).items():
        print_wrapped(out, text, indent=" " * 14, first=f"  {label:11} ")


def _proved(schedule: Schedule, memory_limit: float | None) -> dict[str, str]:
    """Say what holds of a schedule that was checked, with the counts that it was checked on."""
    table = schedule.table
    count = dict(zip(Kind, np.bincount(table.kind, minlength=len(Kind)).tolist(), strict=True))
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
