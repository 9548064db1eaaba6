"""The whole row of passes that make a schedule runnable: reductions, then sends and receives, then the proof.

It decides nothing itself; see the modules of the single passes.
"""

from chimera.ir.checks import check
from chimera.ir.schedule import Schedule
from chimera.passes.communication import communicating
from chimera.passes.derived import has_backward
from chimera.passes.reductions import ReductionMode, places_reductions, reducing

__all__ = ["lower"]


def lower(schedule: Schedule, *, reduce: ReductionMode | None = "end", receive_depth: int | None = 2) -> Schedule:
    """Return the schedule with reductions, sends and receives, proved.

    What is there already stays: reductions that the schedule places itself, updates of an asynchronous one, sends and
    receives of a lowered one. A forward-only program gets no reductions.

    Args:
        schedule: complete; checked before anything is placed.
        reduce: where reductions go, see ``place_reductions``; None for none, as in all runs of an accumulation but the
            last.
        receive_depth: receives posted ahead per channel, see ``add_communication``.

    Raises:
        ScheduleError: naming each broken rule.

    >>> schedule = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]])
    >>> lower(schedule).to_text()
    ['0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD', '1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD']
    """
    trains = has_backward(schedule)
    check(schedule, forward_only=not trains)
    if trains and reduce is not None and not places_reductions(schedule):
        schedule = reducing(schedule, reduce)
        if schedule.is_lowered:
            check(schedule)
    if schedule.is_lowered:
        return schedule
    return communicating(schedule, receive_depth=receive_depth)
