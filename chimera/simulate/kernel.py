"""The one simulation algorithm, in the subset of Python that numba compiles: flat arrays in, start and end out.

Plain Python runs these functions on lists, numba compiles the same source for arrays (``simulate.compiled``), so both
give the same numbers. Nothing here knows actions by name: kinds are codes, needs come from ``ir.dependencies``.

Every rank runs its program in order as far as it can. A rank whose next row needs something unfinished waits for that
one slot; whoever finishes the slot puts the rank back to work. Each row is therefore visited once and each wait costs
one more visit, whatever the order of ranks. A *slot* is (phase, stage, micro-batch) as a flat index; the second half of
the slots stands for the same result after its message, in lowered programs.
"""

from typing import Any, Final, NamedTuple

__all__ = [
    "NOTHING",
    "NOT_YET",
    "REDUCTION",
    "Problem",
    "Progress",
    "ready_time",
    "reduce_from",
    "reduced_time",
    "run",
    "slot_of",
    "wake",
]

NOT_YET: Final = -1.0
"""In ``done``: nothing has finished here. Times are never negative."""

NOTHING: Final = -1
"""In ``waiting``: the rank waits for nothing."""

REDUCTION: Final = -2
"""In ``waiting``: the rank waits for a gradient reduction."""


class Problem(NamedTuple):
    """What is to be simulated; every member but the counts is a flat list or array. Row-wise members come first."""

    kind: Any
    stage: Any
    microbatch: Any
    paired: Any
    pair_time: Any  # [row]; may be empty where no row is paired
    offsets: Any  # [rank + 1]: rows of each rank
    duration: Any  # [kind · num_stages + stage]
    phase: Any  # [kind]: of a computation; -1 otherwise
    sent_phase: Any  # [kind]: of the result a SEND carries; -1 otherwise
    send_kind: Any  # [phase]: the kind that carries this phase's result
    needs_from: Any  # [phase + 1]: rows of the two columns below
    need_phase: Any
    need_offset: Any
    rank_of: Any  # [route · num_stages + stage]
    route_of: Any  # [microbatch]
    reduce_rows: Any  # rows of REDUCE_GRAD, rank after rank
    reduce_offsets: Any  # [rank + 1] into reduce_rows
    holders: Any  # ranks that hold each stage, stage after stage
    holder_offsets: Any  # [stage + 1] into holders
    kind_reduce: int
    kind_step: int
    num_stages: int
    num_microbatches: int
    lowered: bool


class Progress(NamedTuple):
    """What is known so far; all flat, all written in place."""

    start: Any  # [row]
    end: Any  # [row]
    done: Any  # [slot]: time at which the result is there, or NOT_YET
    cursor: Any  # [rank]: next row
    clock: Any  # [rank]: end of the last computation
    waiting: Any  # [rank]: slot the rank waits for, NOTHING or REDUCTION
    stack: Any  # [rank]: ranks that may go on; a rank is on it at most once
    reached: Any  # [rank]: REDUCE_GRAD rows passed
    fired: Any  # [rank]: of these, reductions that have run
    lane_free: Any  # [rank]: end of the last reduction


def ready_time(p: Problem, s: Progress, rank: int, row: int) -> float:
    """Return when everything that computation ``row`` needs is on ``rank``; else note the missing slot, -1."""
    stage, microbatch = p.stage[row], p.microbatch[row]
    phase = p.phase[p.kind[row]]
    ready = 0.0
    for need in range(p.needs_from[phase], p.needs_from[phase + 1]):
        needed_stage = stage + p.need_offset[need]
        if 0 <= needed_stage < p.num_stages:
            needed_phase = p.need_phase[need]
            slot = (needed_phase * p.num_stages + needed_stage) * p.num_microbatches + microbatch
            delay = 0.0
            if needed_stage != stage and p.rank_of[p.route_of[microbatch] * p.num_stages + needed_stage] != rank:
                if p.lowered:
                    slot += (len(p.needs_from) - 1) * p.num_stages * p.num_microbatches
                else:
                    delay = p.duration[p.send_kind[needed_phase] * p.num_stages + needed_stage]
            if s.done[slot] < 0.0:
                s.waiting[rank] = slot
                return NOT_YET
            ready = max(ready, s.done[slot] + delay)
    return ready


def slot_of(p: Problem, phase: int, row: int) -> int:
    """Return the slot of the result ``phase`` that ``row`` makes or carries, on the rank that makes it."""
    return int((phase * p.num_stages + p.stage[row]) * p.num_microbatches + p.microbatch[row])


def wake(p: Problem, s: Progress, row: int, slot: int, top: int) -> int:
    """Put the ranks back to work that wait for ``slot``, just filled by ``row``; return the height of the stack."""
    # Of the two phases one is -1: a row makes a result or carries one.
    phase = max(p.phase[p.kind[row]], p.sent_phase[p.kind[row]])
    route = p.route_of[p.microbatch[row]] * p.num_stages
    for need in range(len(p.need_phase)):
        if p.need_phase[need] == phase and p.need_offset[need] != 0:
            consumer = p.stage[row] - p.need_offset[need]
            if 0 <= consumer < p.num_stages:
                rank = p.rank_of[route + consumer]
                if s.waiting[rank] == slot:
                    s.waiting[rank] = NOTHING
                    s.stack[top] = rank
                    top += 1
    return top


def reduce_from(p: Problem, s: Progress, rank: int, top: int) -> int:
    """Run every reduction that can start now that ``rank`` has a new head of its queue.

    A reduction is a collective: it starts when it is the next one on all ranks that hold its stage. Each one that runs
    gives its ranks new heads, so they are asked again. Returns the new height of the stack.
    """
    asked = [rank]
    while len(asked) > 0:
        head_rank = asked.pop()
        if s.fired[head_rank] == s.reached[head_rank]:
            continue
        stage = p.stage[p.reduce_rows[p.reduce_offsets[head_rank] + s.fired[head_rank]]]
        start = 0.0
        complete = True
        for h in range(p.holder_offsets[stage], p.holder_offsets[stage + 1]):
            holder = p.holders[h]
            if s.fired[holder] == s.reached[holder]:
                complete = False
                break
            row = p.reduce_rows[p.reduce_offsets[holder] + s.fired[holder]]
            if p.stage[row] != stage:
                complete = False
                break
            start = max(start, s.start[row], s.lane_free[holder])
        if complete:
            end = start + p.duration[p.kind_reduce * p.num_stages + stage]
            for h in range(p.holder_offsets[stage], p.holder_offsets[stage + 1]):
                holder = p.holders[h]
                row = p.reduce_rows[p.reduce_offsets[holder] + s.fired[holder]]
                s.start[row] = start
                s.end[row] = s.lane_free[holder] = end
                s.fired[holder] += 1
                asked.append(holder)
                if s.waiting[holder] == REDUCTION:
                    s.waiting[holder] = NOTHING
                    s.stack[top] = holder
                    top += 1
    return top


def reduced_time(p: Problem, s: Progress, rank: int, stage: int) -> float:
    """Return when the last reduction of ``stage`` that ``rank`` has passed ends, 0 without one; else note the wait."""
    for index in range(s.reached[rank] - 1, -1, -1):
        row = p.reduce_rows[p.reduce_offsets[rank] + index]
        if p.stage[row] == stage:
            if index < s.fired[rank]:
                return float(s.end[row])
            s.waiting[rank] = REDUCTION
            return NOT_YET
    return 0.0


def run(p: Problem, s: Progress) -> int:
    """Fill ``s.start`` and ``s.end`` in program order of every rank; return how many rows could run.

    Fewer than all rows means that the ranks are stuck at their cursors. Rows that receive are passed over: their
    times are those of the matching sends, whichever comes first.
    """
    num_ranks = len(p.offsets) - 1
    rows_done = 0
    top = 0
    for rank in range(num_ranks - 1, -1, -1):
        s.stack[top] = rank
        top += 1
    while top > 0:
        top -= 1
        rank = s.stack[top]
        row = s.cursor[rank]
        last = p.offsets[rank + 1]
        while row < last:
            kind = p.kind[row]
            phase = p.phase[kind]
            width = 1
            if phase >= 0:
                ready = ready_time(p, s, rank, row)
                if ready < 0.0:
                    break
                time = p.duration[kind * p.num_stages + p.stage[row]]
                if p.paired[row]:
                    width = 2
                    time = p.pair_time[row]
                    second_ready = ready_time(p, s, rank, row + 1)
                    if second_ready < 0.0:
                        break
                    ready = max(ready, second_ready)
                start = max(s.clock[rank], ready)
                end = start + time
                for part in range(row, row + width):
                    s.start[part] = start
                    s.end[part] = end
                    slot = slot_of(p, p.phase[p.kind[part]], part)
                    s.done[slot] = end
                    if not p.lowered:
                        top = wake(p, s, part, slot, top)
                s.clock[rank] = end
            elif p.sent_phase[kind] >= 0:
                slot = slot_of(p, p.sent_phase[kind], row)
                if s.done[slot] < 0.0:
                    s.waiting[rank] = slot
                    break
                s.start[row] = max(s.clock[rank], s.done[slot])
                s.end[row] = s.start[row] + p.duration[kind * p.num_stages + p.stage[row]]
                slot += (len(p.needs_from) - 1) * p.num_stages * p.num_microbatches
                s.done[slot] = s.end[row]
                top = wake(p, s, row, slot, top)
            elif kind == p.kind_reduce:
                s.start[row] = s.clock[rank]
                s.reached[rank] += 1
                top = reduce_from(p, s, rank, top)
            elif kind == p.kind_step:
                ready = reduced_time(p, s, rank, p.stage[row])
                if ready < 0.0:
                    break
                s.start[row] = max(s.clock[rank], ready)
                s.end[row] = s.clock[rank] = s.start[row] + p.duration[kind * p.num_stages + p.stage[row]]
            row += width
            rows_done += width
        s.cursor[rank] = row
    return rows_done
