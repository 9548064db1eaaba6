"""Which receives each instruction of a lowered schedule waits for: the executor's explicit wait list.

A RECV only posts a buffer; the wait belongs to the computation that uses the data. Nothing is placed or moved here.
"""

from chimera.errors import ScheduleError
from chimera.ir.checks import report
from chimera.ir.checks_messages import message_violations
from chimera.ir.rows import Rows
from chimera.ir.schedule import Schedule

__all__ = ["waits"]


def waits(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, per rank and position, the positions of the RECVs whose data the instruction there needs.

    Args:
        schedule: lowered and proved; without messages nothing waits.

    Raises:
        ScheduleError: a message is missing or stands twice.

    >>> schedule = Schedule.from_text(["0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], routes=[[0, 1]])
    >>> waits(schedule)
    (((), (), (), (0,)), ((), (0,), (), ()))
    """
    rows = Rows.of(schedule)
    found, messages = message_violations(rows)
    if messages is None:
        raise ScheduleError(report(schedule, found))
    lists: list[list[tuple[int, ...]]] = [[()] * len(program) for program in schedule.actions]
    ranks = rows.rank[messages.consumer].tolist()
    users = rows.table.position[messages.consumer].tolist()
    received = rows.table.position[messages.receive].tolist()
    for rank, user, receive in zip(ranks, users, received, strict=True):
        lists[rank][user] = tuple(sorted((*lists[rank][user], receive)))
    return tuple(map(tuple, lists))
