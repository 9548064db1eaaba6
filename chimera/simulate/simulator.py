"""``simulate``: one schedule with its costs, to the timeline of a step on ideal ranks.

What is modelled: each rank computes its program in order, one computation at a time. Messages are eager and
asynchronous: each leaves when its result is there and (in a lowered program) its SEND is reached, takes its own time on
an otherwise empty link, and blocks neither end. A gradient reduction is a collective of all ranks that hold the stage;
it starts when the last of them reaches it, runs beside computation, one after another on each rank. A pair starts when
both its halves are ready and gives both results at its end. Whether memory or message order would deadlock a real run
is not asked here but in ``ir.checks``.
"""

import sys
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from chimera.errors import ScheduleError
from chimera.ir.action import WHOLE_STAGE, Kind
from chimera.ir.costs import Costs, ResolvedCosts
from chimera.ir.dependencies import MESSAGES, NEEDS, PHASES, SENT, Phase
from chimera.ir.schedule import Schedule
from chimera.ir.table import Table
from chimera.ir.timeline import LANES, Lane, Timeline
from chimera.ir.versions import weight_versions
from chimera.simulate import kernel

__all__ = ["COMPILED_FROM_ROWS", "CostModel", "simulate"]

COMPILED_FROM_ROWS: Final = 100_000
"""Programs of at least so many rows are worth the import of numba."""

_COMPILED_ONCE_LOADED_FROM_ROWS: Final = 1_000
"""Programs of at least so many rows run compiled where numba has been imported anyway."""

_NO_PHASE: Final = -1


class CostModel(Protocol):
    """Anything that resolves to the costs of a schedule's actions: ``Costs``, ``StageCosts``."""

    def resolve(self, schedule: Schedule) -> ResolvedCosts:
        """Return the costs of ``schedule``'s actions."""
        ...


def simulate(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    pairs_together: bool = True,
    compiled: bool | None = None,
) -> Timeline:
    """Simulate one step of ``schedule``, compute-only or lowered.

    In a compute-only program every need that crosses ranks costs its message time; a lowered one gets spans for its
    sends and receives, and the same times of computations where each SEND directly follows its producer.

    Args:
        schedule: a checked schedule.
        costs: F = 1 and B = 2 units without.
        pairs_together: whether an overlapped pair is one indivisible span; otherwise its forward, then its backward,
            as a module without an overlapped form runs it.
        compiled: whether numba's form of the kernel runs; by the size of the schedule without.

    Raises:
        ScheduleError: the ranks get stuck; the message says what each one waits for.

    >>> schedule = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]])
    >>> timeline = simulate(schedule, Costs(forward=1, backward=2))
    >>> timeline.makespan, timeline.bubble_fraction, timeline.peak_activations
    (9.0, 0.33333333333333337, (2.0, 1.0))
    """
    resolved = (Costs() if costs is None else costs).resolve(schedule)
    table = schedule.table
    if not pairs_together and table.paired.any():
        table = replace(table, paired=np.zeros(len(table), np.bool_))
    _refuse_foreign_numbers(schedule, table)
    problem = _problem(schedule, table, resolved)
    progress = _progress(schedule, table)
    if _worth_compiled(len(table)) if compiled is None else compiled:
        from chimera.simulate.compiled import run

        rows_done = run(problem, progress)
    else:
        lists = kernel.Progress(*(column.tolist() for column in progress))
        rows_done = kernel.run(_in_lists(problem), lists)
        progress = kernel.Progress(*map(np.asarray, lists))
    if rows_done < len(table) or (progress.fired < progress.reached).any():
        raise ScheduleError(_stuck_message(schedule, table, progress))
    if schedule.is_lowered:
        _time_receives(schedule, table, progress)
    return Timeline(
        name=schedule.name,
        unit=resolved.unit,
        table=table,
        lane=_LANE_OF_KIND[table.kind],
        start=progress.start,
        end=progress.end,
        activations=resolved.activations,
        activation_bytes=resolved.activation_bytes,
        resident_bytes=_resident_per_rank(schedule, resolved),
        held_for_weight_grad=resolved.held_for_weight_grad,
        microbatch_to_route=schedule.microbatch_to_route,
    )


def _worth_compiled(rows: int) -> bool:
    loaded = "chimera.simulate.compiled" in sys.modules
    return rows >= (_COMPILED_ONCE_LOADED_FROM_ROWS if loaded else COMPILED_FROM_ROWS)


def _refuse_foreign_numbers(schedule: Schedule, table: Table) -> None:
    """Refuse stages and micro-batches that the schedule does not have: compiled code does not look at bounds."""
    whole = np.isin(table.kind, list(WHOLE_STAGE))
    for noun, nouns, column, end in (
        ("stage", "stages", table.stage, schedule.num_stages),
        (
            "micro-batch",
            "micro-batches",
            np.where(whole, 0, table.microbatch),
            max(schedule.num_microbatches, int(whole.all())),
        ),
    ):
        if len(foreign := np.flatnonzero((column < 0) | (column >= end))):
            row = int(foreign[0])
            raise ScheduleError(
                f"rank {table.rank[row]}, position {table.position[row]}: {table.action_at(row)} names {noun} "
                f"{column[row]}; schedule {schedule.name!r} has {nouns} 0…{end - 1}"
            )


def _by_kind(values: dict[Kind, int] | dict[Kind, Phase] | dict[Kind, Lane], missing: int) -> NDArray[np.int64]:
    return np.array([values.get(kind, missing) for kind in Kind], np.int64)


_LANE_OF_KIND: Final = _by_kind(LANES, 0).astype(np.uint8)


def _problem(schedule: Schedule, table: Table, resolved: ResolvedCosts) -> kernel.Problem:
    placement = schedule.placement
    holders = [placement.ranks_of(stage) for stage in range(placement.num_stages)]
    reduce_rows = np.flatnonzero(table.kind == Kind.REDUCE_GRAD)
    send_kind = {message.phase: message.send for message in MESSAGES}
    return kernel.Problem(
        kind=table.kind,
        stage=table.stage,
        microbatch=table.microbatch,
        paired=table.paired,
        pair_time=_pair_times(table, resolved),
        offsets=table.offsets,
        duration=resolved.duration.ravel(),
        phase=_by_kind(PHASES, _NO_PHASE),
        sent_phase=_by_kind(SENT, _NO_PHASE),
        send_kind=np.array([send_kind.get(phase, _NO_PHASE) for phase in Phase], np.int64),
        needs_from=np.array([sum(row[0] < phase for row in NEEDS) for phase in range(len(Phase) + 1)], np.int64),
        need_phase=np.array([needed for _, needed, _ in sorted(NEEDS)], np.int64),
        need_offset=np.array([offset for _, _, offset in sorted(NEEDS)], np.int64),
        rank_of=np.array(placement.routes, np.int64).ravel(),
        route_of=np.array(schedule.microbatch_to_route, np.int64),
        reduce_rows=reduce_rows,
        reduce_offsets=np.searchsorted(reduce_rows, table.offsets),
        holders=np.array([rank for ranks in holders for rank in ranks], np.int64),
        holder_offsets=np.cumsum([0, *map(len, holders)]),
        kind_reduce=int(Kind.REDUCE_GRAD),
        kind_step=int(Kind.STEP),
        num_stages=placement.num_stages,
        num_microbatches=schedule.num_microbatches,
        lowered=schedule.is_lowered,
    )


def _progress(schedule: Schedule, table: Table) -> kernel.Progress:
    num_ranks = schedule.num_ranks
    num_slots = len(Phase) * schedule.num_stages * schedule.num_microbatches * (2 if schedule.is_lowered else 1)
    return kernel.Progress(
        start=np.zeros(len(table)),
        end=np.zeros(len(table)),
        done=np.full(num_slots, kernel.NOT_YET),
        cursor=table.offsets[:-1].copy(),
        clock=np.zeros(num_ranks),
        waiting=np.full(num_ranks, kernel.NOTHING),
        stack=np.zeros(num_ranks, np.int64),
        reached=np.zeros(num_ranks, np.int64),
        fired=np.zeros(num_ranks, np.int64),
        lane_free=np.zeros(num_ranks),
    )


def _in_lists(problem: kernel.Problem) -> kernel.Problem:
    columns = {name: value.tolist() for name, value in problem._asdict().items() if isinstance(value, np.ndarray)}
    return problem._replace(**columns)


def _pair_times(table: Table, resolved: ResolvedCosts) -> NDArray[np.float64]:
    """Return the time of the pair whose forward stands in each row, 0 elsewhere; nothing where there is no pair."""
    firsts = np.flatnonzero(table.paired & (table.kind == Kind.F))
    if not len(firsts):
        return np.empty(0)
    times = np.zeros(len(table))
    single = resolved.duration[table.kind, table.stage]
    times[firsts] = single[firsts] + single[firsts + 1]
    if resolved.pair:
        for row in firsts.tolist():
            key = (int(table.stage[row]), int(table.stage[row + 1]), Kind(int(table.kind[row + 1])))
            times[row] = resolved.pair.get(key, times[row])
    return times


def _time_receives(schedule: Schedule, table: Table, progress: kernel.Progress) -> None:
    """Give every receive the span of the send that feeds it: a message is in flight at both ends at once."""
    for message in MESSAGES:
        # The row behind the last stage stands for the stages beyond either end (-1 and num_stages), which send nothing.
        send_of = np.full((schedule.num_stages + 1, schedule.num_microbatches), kernel.NOTHING)
        rows = np.flatnonzero(table.kind == message.send)
        send_of[table.stage[rows], table.microbatch[rows]] = rows
        rows = np.flatnonzero(table.kind == message.receive)
        feeding = send_of[table.stage[rows] + message.sender, table.microbatch[rows]]
        if (feeding == kernel.NOTHING).any():
            row = int(rows[feeding == kernel.NOTHING][0])
            rank = int(table.rank[row])
            raise ScheduleError(f"rank {rank}: {table.action_at(row)} receives what no rank sends")
        progress.start[rows] = progress.start[feeding]
        progress.end[rows] = progress.end[feeding]


def _resident_per_rank(schedule: Schedule, resolved: ResolvedCosts) -> NDArray[np.float64] | None:
    if resolved.resident_bytes is None:
        return None
    weight = np.zeros(schedule.num_stages) if resolved.weight_bytes is None else resolved.weight_bytes
    return np.array(
        [
            sum(resolved.resident_bytes[stage] + (most - 1) * weight[stage] for stage, most in versions.items())
            for versions in weight_versions(schedule)
        ],
        np.float64,
    )


def _stuck_message(schedule: Schedule, table: Table, progress: kernel.Progress) -> str:
    """Say for every stuck rank at which action it stands and what it waits for."""
    lines = [f"schedule {schedule.name!r} is stuck: no rank can go on"]
    for rank in range(schedule.num_ranks):
        row = int(progress.cursor[rank])
        if row < table.offsets[rank + 1]:
            awaited = _awaited(schedule, table, int(progress.waiting[rank]))
            lines.append(f"  rank {rank}, position {table.position[row]}: {table.action_at(row)} waits for {awaited}")
        elif progress.fired[rank] < progress.reached[rank]:
            first = int(np.searchsorted(np.flatnonzero(table.kind == Kind.REDUCE_GRAD), table.offsets[rank]))
            row = int(np.flatnonzero(table.kind == Kind.REDUCE_GRAD)[first + int(progress.fired[rank])])
            lines.append(
                f"  rank {rank}, position {table.position[row]}: {table.action_at(row)} waits for the other ranks "
                f"that hold stage {table.stage[row]}: {schedule.placement.ranks_of(int(table.stage[row]))}"
            )
    lines.append("  'chimera schedule check' shows the cycle")
    return "\n".join(lines)


def _awaited(schedule: Schedule, table: Table, slot: int) -> str:
    if slot == kernel.REDUCTION:
        return "its stage's gradient reduction"
    size = schedule.num_stages * schedule.num_microbatches
    message, slot = divmod(slot, len(Phase) * size)
    phase, rest = divmod(slot, size)
    stage, microbatch = divmod(rest, schedule.num_microbatches)
    where = f"on rank {schedule.rank_of(stage, microbatch)}"
    kinds = [k for k, p in (SENT if message else PHASES).items() if p == phase]
    present = (table.stage == stage) & (table.microbatch == microbatch) & np.isin(table.kind, kinds)
    if rows := np.flatnonzero(present).tolist():
        return f"{table.action_at(rows[0])} {where}"
    return f"{stage}{kinds[0].name}{microbatch} {where}, which no rank has"
