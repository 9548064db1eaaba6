"""The proof of a schedule: complete, on the right ranks, in order, its messages matched, never stuck, within memory.

What each rule says stands in the ``checks_*`` modules; here they are put in an order in which each may rely on the ones
before, and their findings into one message. A schedule without sends and receives is proved on its dependencies.
"""

from collections.abc import Sequence

from chimera.errors import ScheduleError
from chimera.ir.checks_complete import completeness, placement, shape
from chimera.ir.checks_messages import Messages, message_violations
from chimera.ir.checks_order import local_order
from chimera.ir.checks_progress import deadlock
from chimera.ir.checks_reductions import reduction_violations
from chimera.ir.checks_updates import update_violations
from chimera.ir.grid import grid_text
from chimera.ir.memory import over_limit
from chimera.ir.rows import Rows
from chimera.ir.schedule import Schedule
from chimera.ir.versions import updates_before
from chimera.ir.violation import Violation

__all__ = ["Violation", "check", "report", "violations"]

_LISTED = 10
_ROOTS_OF_DEADLOCK = frozenset({"order", "messages"})
"""What is found by these rules often gets ranks stuck; the cycle would only say the same less clearly."""


def violations(schedule: Schedule, *, memory_limit: float | None = None, forward_only: bool = False) -> list[Violation]:
    """Return every broken rule, an empty list for a schedule that is proved.

    Later rules are asked only where the earlier ones hold: order and messages of a complete schedule, and whether it
    gets stuck when everything it waits for exists.

    Args:
        schedule: with or without sends, receives and reductions.
        memory_limit: most activations per rank, in units of 1/p of the model for one micro-batch.
        forward_only: whether it is a program of forwards alone, as for evaluation.
    """
    found = shape(schedule)
    if not found:
        found = [*placement(schedule), *completeness(schedule, forward_only=forward_only)]
    if found:
        return found
    rows = Rows.of(schedule)
    messages: Messages | None = None
    found = local_order(rows)
    if schedule.is_lowered:
        wrong, messages = message_violations(rows)
        found.extend(wrong)
    before = updates_before(schedule.table, schedule.num_stages)
    updates = update_violations(schedule, rows, before)
    found.extend(updates or reduction_violations(rows, before))
    if memory_limit is not None:
        found.extend(over_limit(schedule, memory_limit))
    if not any(violation.rule in _ROOTS_OF_DEADLOCK for violation in found):
        found.extend(deadlock(rows, messages))
    return found


def check(schedule: Schedule, *, memory_limit: float | None = None, forward_only: bool = False) -> None:
    """Prove a schedule; see ``violations``.

    Raises:
        ScheduleError: naming rank, position and action of each broken rule, with the order grid.
    """
    found = violations(schedule, memory_limit=memory_limit, forward_only=forward_only)
    if found:
        raise ScheduleError(report(schedule, found))


def report(schedule: Schedule, found: Sequence[Violation]) -> str:
    """Write violations as a list, the first ten in words, and the grid with a mark at each of those."""
    listed = found[:_LISTED]
    count = "1 violation" if len(found) == 1 else f"{len(found)} violations"
    lines = [f"schedule {schedule.name!r} has {count}:", *(f"  {violation}" for violation in listed)]
    if len(found) > len(listed):
        lines.append(f"  … and {len(found) - len(listed)} more")
    marks = [(violation.rank, violation.position) for violation in listed]
    return "\n".join([*lines, grid_text(schedule, marks)])
