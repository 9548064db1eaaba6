"""Where each gradient reduction starts: at the end, as early as possible, or early only where it hides in a bubble.

The modes are those of the Chimera paper (Li & Hoefler, SC'21, section 3.2): ``eager`` is its eager-sync, ``eager-opt``
its eager-sync-opt. How long a reduction takes is not asked; idle slots are those of equal forward and backward slots.
"""

from collections.abc import Sequence
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from chimera.errors import ScheduleError, UsageError, nearest_names
from chimera.ir.action import COMMUNICATIONS, COMPUTATIONS, SENDS, Instruction, Kind, Overlap
from chimera.ir.checks import check
from chimera.ir.costs import Costs
from chimera.ir.rows import code_mask
from chimera.ir.schedule import Schedule
from chimera.ir.table import NO_MICROBATCH, Table
from chimera.passes.derived import compute_only
from chimera.passes.insertion import Insertion, insert_rows
from chimera.simulate.simulator import simulate

__all__ = [
    "REDUCTION_MODES",
    "ReductionMode",
    "before_reduction",
    "place_reductions",
    "places_reductions",
    "reducing",
]

ReductionMode = Literal["end", "eager", "eager-opt"]
REDUCTION_MODES: Final[tuple[ReductionMode, ...]] = get_args(ReductionMode)


def places_reductions(schedule: Schedule) -> bool:
    """Return whether the schedule says itself where gradients are reduced."""
    return bool((schedule.table.kind == Kind.REDUCE_GRAD).any())


def before_reduction(program: Sequence[Instruction]) -> frozenset[int]:
    """Return the positions of backwards that a rank follows by the reduction of their stage, messages apart.

    Parts of that reduction may start inside such a backward as their gradients become complete: no other reduction
    stands between, so the order that was proved stays.

    >>> from chimera.ir.action import parse_program
    >>> sorted(before_reduction(list(parse_program("1B0 1SEND_B0 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD"))))
    [0, 4]
    """
    found = set()
    latest: tuple[int, int] | None = None
    for position, action in enumerate(program):
        if type(action) is Overlap:
            latest = None
            continue
        if action.kind in {Kind.B, Kind.W}:
            latest = position, action.stage
        elif action.kind is Kind.REDUCE_GRAD and latest is not None and latest[1] == action.stage:
            found.add(latest[0])
        if action.kind not in COMMUNICATIONS | {Kind.B, Kind.W}:
            latest = None
    return frozenset(found)


def place_reductions(schedule: Schedule, mode: ReductionMode) -> Schedule:
    """Return the schedule with one REDUCE_GRAD per update, stage and rank that holds it, proved.

    All ranks start reductions in one order, so that no two of them wait for each other. An asynchronous schedule has
    placed its updates itself: there each STEP gets its reduction directly before it, whatever the mode.

    Args:
        schedule: without reductions.
        mode: ``end``: behind each rank's last computation. ``eager``: behind the rank's last gradient of the stage.
            ``eager-opt``: eager only if the rank is idle for part of the time between that gradient and its last
            computation, else at the end, for there is no bubble to hide it in.

    Raises:
        ScheduleError: the schedule has reductions of its own, or is wrong.
    """
    reduced = reducing(schedule, mode)
    check(reduced)
    return reduced


def reducing(schedule: Schedule, mode: ReductionMode) -> Schedule:
    """Do what ``place_reductions`` does for a schedule that has been checked, leaving the proof to the caller."""
    if mode not in REDUCTION_MODES:
        known = ", ".join(REDUCTION_MODES)
        raise UsageError(f"reductions: got mode {mode!r}{nearest_names(mode, REDUCTION_MODES)}; needed: one of {known}")
    if places_reductions(schedule):
        raise ScheduleError(
            f"schedule {schedule.name!r} places its reductions itself; take them out with "
            "passes.derived.without_reductions first, or lower it with reduce=None"
        )
    if schedule.is_asynchronous:
        return _before_steps(schedule)
    held = np.zeros((schedule.num_ranks, schedule.num_stages), np.bool_)
    for route in schedule.placement.routes:
        held[list(route), np.arange(schedule.num_stages)] = True
    ends = np.diff(schedule.table.offsets) if not schedule.table.paired.any() else _lengths(schedule)
    gap = np.where(held, ends[:, None], 0)
    order = np.arange(schedule.num_stages)[::-1]
    if mode != "end":
        last = _last_gradients(schedule.table, held.shape)
        ready, idle_after = _timing(schedule, held.shape)
        behind = _behind(schedule.table, last)
        gap = behind if mode == "eager" else np.where(idle_after, behind, gap)
        # By the time the last replica is ready, no reduction is held back by the ones before it: each of those is
        # complete on all its ranks no later than this one can start.
        order = np.lexsort((-np.arange(schedule.num_stages), ready.max(axis=0)))
    return _inserted(schedule, held, gap, order)


def _before_steps(schedule: Schedule) -> Schedule:
    """Insert a reduction before every STEP."""
    table = schedule.table
    steps = np.flatnonzero(table.kind == Kind.STEP)
    new = Insertion(
        rank=table.rank[steps],
        gap=table.position[steps],
        kind=np.full(len(steps), Kind.REDUCE_GRAD, np.uint8),
        stage=table.stage[steps],
        microbatch=np.full(len(steps), NO_MICROBATCH),
    )
    return schedule.with_table(insert_rows(table, [new]))


def _inserted(
    schedule: Schedule, held: NDArray[np.bool_], gap: NDArray[np.int64], order: NDArray[np.int64]
) -> Schedule:
    """Insert in one order of stages everywhere: none goes before the gap of one that precedes it on the same rank."""
    in_order = np.maximum.accumulate(np.where(held, gap, 0)[:, order], axis=1)
    rank, index = np.nonzero(held[:, order])
    size = len(rank)
    new = Insertion(
        rank=rank,
        gap=in_order[rank, index],
        kind=np.full(size, Kind.REDUCE_GRAD, np.uint8),
        stage=order[index],
        microbatch=np.full(size, NO_MICROBATCH),
    )
    return schedule.with_table(insert_rows(schedule.table, [new]))


def _lengths(schedule: Schedule) -> NDArray[np.int64]:
    return np.array([len(program) for program in schedule.actions])


def _last_gradients(table: Table, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the row of each rank's last B or W per stage, −1 where it has none, [ranks, stages]."""
    last = np.full(shape, -1, np.int64)
    rows = np.flatnonzero(code_mask(table, Kind.B, Kind.W))
    np.maximum.at(last, (table.rank[rows], table.stage[rows]), rows)
    return last


def _behind(table: Table, last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the gap behind each last gradient and the sends that follow it at once; the start where there is none."""
    sends = code_mask(table, *SENDS)
    gap = np.zeros(last.shape, np.int64)
    for rank, stage in np.argwhere(last >= 0).tolist():
        row, end = int(last[rank, stage]), int(table.offsets[rank + 1])
        while row + 1 < end and sends[row + 1]:
            row += 1
        gap[rank, stage] = table.position[row] + 1
    return gap


def _timing(schedule: Schedule, shape: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return when each rank has its last gradient per stage, and whether it idles between that and its last work."""
    timeline = simulate(compute_only(schedule), Costs(forward=1, backward=1))
    table = timeline.table
    last = _last_gradients(table, shape)
    ready = np.where(last >= 0, timeline.end[last], 0.0)
    computes = code_mask(table, *COMPUTATIONS)
    idle_after = np.zeros(shape, np.bool_)
    for rank in range(shape[0]):
        rows = slice(*table.offsets[rank : rank + 2].tolist())
        start, end = timeline.start[rows][computes[rows]], timeline.end[rows][computes[rows]]
        idles = start[1:] > end[:-1] + 1e-9
        latest = end[:-1][idles].max(initial=-1.0)  # where the rank's last idle time begins
        idle_after[rank] = ready[rank] <= latest + 1e-9
    return ready, idle_after
