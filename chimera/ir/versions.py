"""Versions of the weights in an asynchronous schedule, by program order alone: who updates what, who takes which.

The n-th STEP of a stage on its rank is update n (from 0) and makes version n + 1; the weights of the start are version
0. A micro-batch's backward takes the very version that its forward took, so a rank keeps each until the last backward
that needs it, and beside them the newest. What an update does is not known here.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Kind, flatten
from chimera.ir.rows import code_mask
from chimera.ir.schedule import Schedule
from chimera.ir.table import Table

__all__ = ["Versions", "forward_versions", "updates_before", "updates_of_microbatches", "weight_versions"]


def updates_before(table: Table, num_stages: int) -> NDArray[np.int64]:
    """Return for each row how often its stage was updated before it on its rank, [rows]."""
    steps = table.kind == Kind.STEP
    if not steps.any():
        return np.zeros(len(table), np.int64)
    replica = table.rank.astype(np.int64) * num_stages + table.stage
    order = np.argsort(replica, kind="stable")
    before = np.cumsum(steps[order]) - steps[order]
    starts = np.flatnonzero(np.diff(replica[order], prepend=-1))
    before -= np.repeat(before[starts], np.diff(starts, append=len(order)))
    count = np.empty(len(order), np.int64)
    count[order] = before
    return count


def updates_of_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """Return for each micro-batch the update that its gradients are part of; 0 for all of a synchronous schedule.

    In a proved schedule it is the same on every stage.

    >>> row = "0F0 0F1 0B0 0STEP 0F2 0B1 0B2 0STEP"
    >>> updates_of_microbatches(Schedule.from_text([row], routes=[[0]]))
    (0, 1, 1)
    """
    table = schedule.table
    rows = np.flatnonzero(code_mask(table, Kind.B, Kind.I))
    update = np.zeros(schedule.num_microbatches, np.int64)
    update[table.microbatch[rows]] = updates_before(table, schedule.num_stages)[rows]
    return tuple(update.tolist())


def forward_versions(schedule: Schedule) -> NDArray[np.int64]:
    """Return the version that each micro-batch takes on each stage, [stages, micro-batches].

    It is what the schedule says for the micro-batch, or else the newest that the stage has at its forward.

    >>> row = "0F0 0F1 0B0 0STEP 0F2 0B1 0STEP 0B2 0STEP"
    >>> forward_versions(Schedule.from_text([row], routes=[[0]])).tolist()
    [[0, 0, 1]]
    """
    if schedule.microbatch_to_version is not None:
        return np.tile(np.array(schedule.microbatch_to_version, np.int64), (schedule.num_stages, 1))
    table = schedule.table
    rows = np.flatnonzero(table.kind == Kind.F)
    version = np.zeros((schedule.num_stages, schedule.num_microbatches), np.int64)
    version[table.stage[rows], table.microbatch[rows]] = updates_before(table, schedule.num_stages)[rows]
    return version


class Versions:
    """The versions of one stage's weights that its rank holds, while a program runs.

    Args:
        taken: the version that each micro-batch of this rank takes, in any order.

    Attributes:
        newest: the version that the latest update made.
    """

    def __init__(self, taken: Iterable[int]) -> None:
        self.newest = 0
        self._uses = Counter(taken)

    @property
    def held(self) -> set[int]:
        """The newest, and those that a micro-batch takes or has taken and not yet gone back through."""
        return {self.newest, *(version for version in self._uses if version < self.newest)}

    def needs(self, version: int) -> bool:
        """Return whether a micro-batch still takes a version, or has yet to go back through it."""
        return version in self._uses

    def release(self, version: int) -> None:
        """End one micro-batch's use of a version."""
        self._uses[version] -= 1
        if not self._uses[version]:
            del self._uses[version]

    def update(self) -> None:
        """Begin the next version."""
        self.newest += 1


def weight_versions(schedule: Schedule) -> tuple[dict[int, int], ...]:
    """Return, for each rank, the most versions of each stage's weights that it holds at once.

    >>> asynchronous, synchronous = "0F0 0F1 0B0 0STEP 0F2 0B1 0STEP 0B2 0STEP", "0F0 0F1 0B0 0B1"
    >>> for program in (asynchronous, synchronous):
    ...     print(*weight_versions(Schedule.from_text([program], routes=[[0]])))
    {0: 2}
    {0: 1}
    """
    if not schedule.is_asynchronous:
        return tuple(dict.fromkeys(schedule.placement.stages_on(rank), 1) for rank in range(schedule.num_ranks))
    taken = forward_versions(schedule)
    return tuple(_most_on(schedule, rank, taken) for rank in range(schedule.num_ranks))


def _most_on(schedule: Schedule, rank: int, taken: NDArray[np.int64]) -> dict[int, int]:
    actions = list(flatten(schedule.actions[rank]))
    most = dict.fromkeys(schedule.placement.stages_on(rank), 1)
    here = {stage: Versions(int(taken[s, m]) for k, s, m in actions if k is Kind.F and s == stage) for stage in most}
    for kind, stage, microbatch in actions:
        if kind is Kind.STEP:
            here[stage].update()
            most[stage] = max(most[stage], len(here[stage].held))
        elif kind in {Kind.B, Kind.W}:
            here[stage].release(int(taken[stage, microbatch]))
    return most
