"""Joins an I and the W right after it into a B where that costs nothing, and gains where B takes less than the two.

A rule of the list scheduler decides between B and I + W by kind; this pass decides pair by pair, on the simulated
times: the B has to end by the end of the W, and its gradient to arrive before anyone starts on it.
"""

import numpy as np

from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Schedule
from chimera.schedules.search.problem import Problem
from chimera.simulate import simulate

__all__ = ["fused"]

_SLACK = 1e-9
_MARGIN = 0.05
"""Part of a B by which its gradient has to be early where the B gains nothing, so that a slow message costs nothing."""


def fused(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the schedule with every I and adjacent W joined that delays nothing.

    >>> from chimera.schedules.search.placements import dealt, place
    >>> problem = Problem.uniform(place("linear", 2), dealt(1, 1), 2.0)
    >>> split = Schedule.from_text(["0F0 0I0 0W0", "1F0 1I0 1W0"], routes=[[0, 1]])
    >>> fused(problem, split).to_text()
    ['0F0 0B0', '1F0 1I0 1W0']
    """
    table, timeline = schedule.table, simulate(schedule, problem.costs)
    duration = problem.resolved.duration
    rows = np.flatnonzero((table.kind[:-1] == Kind.I) & (table.kind[1:] == Kind.W))
    same = (table.stage[rows] == table.stage[rows + 1]) & (table.microbatch[rows] == table.microbatch[rows + 1])
    rows = rows[same & (table.rank[rows] == table.rank[rows + 1])]
    if not len(rows):
        return schedule
    stage, microbatch = table.stage[rows], table.microbatch[rows]
    end = timeline.start[rows] + duration[Kind.B][stage]
    slack = _SLACK * max(1.0, timeline.finish)
    in_time = end <= timeline.end[rows + 1] + slack
    # When the stage before starts on the gradient; the first stage has none, and that is never.
    starts = np.full((problem.num_stages, len(problem.microbatch_to_route)), np.inf)
    gradients = np.flatnonzero((table.kind == Kind.I) | (table.kind == Kind.B))
    starts[table.stage[gradients], table.microbatch[gradients]] = timeline.start[gradients]
    route = np.array(problem.microbatch_to_route)[microbatch]
    needed = np.where(stage > 0, starts[stage - 1, microbatch], np.inf)
    gains = duration[Kind.B] < (duration[Kind.I] + duration[Kind.W]) * (1 - _SLACK)
    margin = np.where(gains, 0.0, _MARGIN * duration[Kind.B])[stage]
    joined = rows[in_time & (end + problem.send_backward[route, stage] + margin <= needed + slack)]
    kind = table.kind.copy()
    kind[joined] = Kind.B
    keep = np.ones(len(table), np.bool_)
    keep[joined + 1] = False
    programs: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    for rank, code, own, mb in zip(
        table.rank[keep].tolist(),
        kind[keep].tolist(),
        table.stage[keep].tolist(),
        table.microbatch[keep].tolist(),
        strict=True,
    ):
        programs[rank].append(Action(Kind(code), own, mb))
    return problem.schedule(schedule.name, tuple(map(tuple, programs)))
