"""Versions of the weights that an asynchronous schedule needs at once, by program order alone.

A stage keeps the weights of a forward until the backward of its micro-batch, and beside them the newest. Synchronous
schedules, which have no STEP, need one. What an update does is not known here.
"""

from collections import Counter, defaultdict

from chimera.ir.action import Kind, flatten
from chimera.ir.schedule import Schedule

__all__ = ["weight_versions"]


def weight_versions(schedule: Schedule) -> tuple[dict[int, int], ...]:
    """Return, for each rank, the most versions of each stage's weights that it holds at once.

    >>> asynchronous, synchronous = "0F0 0F1 0B0 0STEP 0F2 0B1 0STEP 0B2 0STEP", "0F0 0F1 0B0 0B1"
    >>> for program in (asynchronous, synchronous):
    ...     print(*weight_versions(Schedule.from_text([program], routes=[[0]])))
    {0: 2}
    {0: 1}
    """
    return tuple(_versions_on(schedule, rank) for rank in range(schedule.num_ranks))


def _versions_on(schedule: Schedule, rank: int) -> dict[int, int]:
    most = dict.fromkeys(schedule.placement.stages_on(rank), 1)
    newest: Counter[int] = Counter()
    taken: defaultdict[int, dict[int, int]] = defaultdict(
        dict
    )  # [stage][micro-batch in flight]: version of its forward
    for kind, stage, microbatch in flatten(schedule.actions[rank]):
        if microbatch is None:
            newest[stage] += kind is Kind.STEP
        elif kind is Kind.F:
            taken[stage][microbatch] = newest[stage]
        elif kind in {Kind.B, Kind.W}:
            taken[stage].pop(microbatch, None)
        most[stage] = max(most[stage], len({newest[stage], *taken[stage].values()}))
    return most
