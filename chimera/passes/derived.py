"""Schedules derived from a schedule by leaving out: no reductions, no messages, no pairs, no backward.

The forward-only program is made anew for any number of micro-batches; the others keep the order of what stays.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np

from chimera.errors import UsageError
from chimera.ir.action import BACKWARDS, COMMUNICATIONS, Action, Instruction, Kind, Overlap
from chimera.ir.checks import check
from chimera.ir.rows import code_mask
from chimera.ir.schedule import Placement, Schedule

__all__ = ["compute_only", "forward_only", "has_backward", "on_one_rank", "pairs_apart", "without_reductions"]


def has_backward(schedule: Schedule) -> bool:
    """Return whether any action computes a gradient; a program without is one of forwards alone."""
    return bool(code_mask(schedule.table, *BACKWARDS).any())


def without_reductions(schedule: Schedule) -> Schedule:
    """Return the schedule without REDUCE_GRAD: what all runs of an accumulation but the last execute."""
    return _keeping(schedule, lambda instruction: instruction[0] is not Kind.REDUCE_GRAD)


def compute_only(schedule: Schedule) -> Schedule:
    """Return the schedule without sends, receives and reductions, as builders give it and ``lower`` takes it."""
    left_out = COMMUNICATIONS | {Kind.REDUCE_GRAD}
    return _keeping(schedule, lambda instruction: instruction[0] not in left_out)


def _keeping(schedule: Schedule, keep: Callable[[Instruction], bool]) -> Schedule:
    # The first member of an instruction is an action's kind, or a pair's forward, which is no kind and always stays.
    kept = replace(schedule, actions=tuple(tuple(filter(keep, program)) for program in schedule.actions))
    check(kept, forward_only=not has_backward(kept))
    return kept


def pairs_apart(schedule: Schedule, *, keep: Callable[[Overlap], bool] = lambda _: False) -> Schedule:
    """Return the schedule with each pair, but those to ``keep``, as its forward and then its backward.

    Put before sends are placed, the forward's result leaves before the backward runs.

    >>> schedule = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"], routes=[[0, 1]])
    >>> pairs_apart(schedule).to_text()
    ['0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1']
    """
    if not schedule.table.paired.any():
        return schedule
    # As pairs, too, it has to be right: apart, a pair of which one half needs the other would be none the wiser.
    check(schedule)
    programs = tuple(
        tuple(chain.from_iterable(i if type(i) is Overlap and not keep(i) else (i,) for i in program))
        for program in schedule.actions
    )
    apart = replace(schedule, actions=programs)
    check(apart)
    return apart


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the program that runs ``microbatches`` forward on the schedule's placement, for evaluation.

    Routes take turns. A rank runs stage s of its route's k-th micro-batch in the order of s + k, the slot in which
    unit-time forwards on a straight pipeline would run it, and the later stage first where two are equal.

    >>> schedule = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]])
    >>> forward_only(schedule, 3).to_text()
    ['0F0 0F1 0F2', '1F0 1F1 1F2']
    """
    if microbatches < 1:
        raise UsageError(f"forward_only: got {microbatches} micro-batches; needed: at least 1")
    routes = np.array(schedule.placement.routes)
    num_routes, num_stages = routes.shape
    number = np.arange(microbatches)
    route, index = number % num_routes, number // num_routes
    rank = routes[route].ravel()
    microbatch, stage = np.repeat(number, num_stages), np.tile(np.arange(num_stages), microbatches)
    order = np.lexsort((microbatch, -stage, stage + index[microbatch], rank))
    programs: list[list[Instruction]] = [[] for _ in range(schedule.num_ranks)]
    columns = zip(rank[order].tolist(), stage[order].tolist(), microbatch[order].tolist(), strict=True)
    for on_rank, of_stage, of_microbatch in columns:
        programs[on_rank].append(Action(Kind.F, of_stage, of_microbatch))
    derived = Schedule(
        f"{schedule.name}, forward only",
        schedule.placement,
        tuple(route.tolist()),
        tuple(map(tuple, programs)),
        schedule.microbatch_share,
    )
    check(derived, forward_only=True)
    return derived


def on_one_rank(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the same stages on a single rank, one micro-batch after another: what actions cost with nobody else busy.

    >>> schedule = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]])
    >>> on_one_rank(schedule, 2).to_text()
    ['0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1']
    """
    stages = range(schedule.num_stages)
    program = tuple(
        Action(kind, stage, microbatch)
        for microbatch in range(microbatches)
        for kind, order in ((Kind.F, stages), (Kind.B, reversed(stages)))
        for stage in order
    )
    serial = Schedule(
        f"{schedule.name}, on one rank",
        Placement(1, ((0,) * schedule.num_stages,)),
        (0,) * microbatches,
        (program,),
        schedule.microbatch_share,
    )
    check(serial)
    return serial
