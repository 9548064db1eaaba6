"""The updates of an asynchronous schedule: every stage makes the same ones, of the same micro-batches, in time.

What a schedule without STEP takes for granted is asked here of one that has it: all gradients of a micro-batch are part
of one update, each is followed by it, and the weights that a forward takes are there. Where gradients are reduced is
asked in ``checks_reductions``.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Action, Kind
from chimera.ir.dependencies import Phase
from chimera.ir.rows import NOTHING, Rows, code_mask
from chimera.ir.schedule import Schedule
from chimera.ir.versions import forward_versions
from chimera.ir.violation import Violation, violation_at

__all__ = ["update_violations"]


def update_violations(schedule: Schedule, rows: Rows, before: NDArray[np.int64]) -> list[Violation]:
    """Check the STEPs of a complete schedule, and the versions that its micro-batches take.

    Args:
        schedule: complete, asynchronous or not.
        rows: its rows.
        before: for each row, the updates of its stage before it; see ``versions.updates_before``.
    """
    found = list(_versions_not_there(schedule, rows, before)) if schedule.microbatch_to_version is not None else []
    if schedule.is_asynchronous:
        number = int(before[rows.table.kind == Kind.STEP].max()) + 1
        found.extend(_missing_steps(rows, before, number))
        found.extend(_gradients(rows, before, number) or _empty(rows, before, number))
    return found


def _versions_not_there(schedule: Schedule, rows: Rows, before: NDArray[np.int64]) -> Iterator[Violation]:
    table = rows.table
    forwards = np.flatnonzero(table.kind == Kind.F)
    taken = forward_versions(schedule)[table.stage[forwards], table.microbatch[forwards]]
    early = taken > before[forwards]
    for row, version in zip(forwards[early].tolist(), taken[early].tolist(), strict=True):
        message = (
            f"it takes the weights after {version} updates of its stage, of which {before[row]} come before it on this "
            "rank; move it behind that STEP, or lower its microbatch_to_version"
        )
        yield violation_at(table, row, "updates", message)


def _missing_steps(rows: Rows, before: NDArray[np.int64], number: int) -> Iterator[Violation]:
    table = rows.table
    made = np.zeros((rows.placement.num_ranks, rows.placement.num_stages), np.int64)
    steps = np.flatnonzero(table.kind == Kind.STEP)
    np.maximum.at(made, (table.rank[steps], table.stage[steps]), before[steps] + 1)
    for rank, stage in rows.replicas():
        if made[rank, stage] < number:
            message = (
                f"missing: this rank updates the stage {made[rank, stage]} times, others update theirs {number} times; "
                "every stage makes every update"
            )
            text = str(Action(Kind.STEP, stage, None))
            yield Violation(rank, rows.end_of(rank), text, message, "updates")


def _gradients(rows: Rows, before: NDArray[np.int64], number: int) -> list[Violation]:
    """Find gradients without an update behind them, and those of one micro-batch in different updates."""
    table = rows.table
    gradients = np.flatnonzero(code_mask(table, Kind.B, Kind.I, Kind.W))
    update = before[gradients]
    # What the last stage does first with a micro-batch decides, for its loss is divided by the counts of that update.
    decides = rows.place[Phase.GRADIENT, -1]
    expected = before[decides][table.microbatch[gradients]]
    found = []
    for row in gradients[update >= number].tolist():
        step = Action(Kind.STEP, int(table.stage[row]), None)
        found.append(violation_at(table, row, "updates", f"no {step} stands behind it to use its gradient; add one"))
    apart = (update != expected) & (update < number) & (expected < number)
    for row in gradients[apart].tolist():
        there = int(decides[table.microbatch[row]])
        message = (
            f"its gradient is part of update {before[row]} of its stage, that of {table.action_at(there)} of update "
            f"{before[there]}; all stages take a "
            "micro-batch into the same update"
        )
        found.append(violation_at(table, row, "updates", message))
    return found


def _empty(rows: Rows, before: NDArray[np.int64], number: int) -> list[Violation]:
    table = rows.table
    last = rows.place[Phase.GRADIENT, -1]
    used = np.bincount(before[last[last != NOTHING]], minlength=number) > 0
    steps = np.flatnonzero((table.kind == Kind.STEP) & (table.stage == rows.placement.num_stages - 1))
    message = "no micro-batch's gradients are part of this update; remove its STEPs"
    return [violation_at(table, row, "updates", message) for row in steps[~used[before[steps]]].tolist()]
