"""What a check found wrong at one place of a schedule. It neither finds nor prints anything."""

from dataclasses import dataclass

from chimera.ir.table import Table

__all__ = ["Violation", "violation_at"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Attributes:
        rank: the rank whose program breaks it.
        position: the place in that program; its length where an action is missing at the end.
        action: text of the action that is there or missing.
        message: what is wrong and what to do.
        rule: ``shape``, ``placement``, ``complete``, ``order``, ``messages``, ``fifo``, ``updates``, ``reductions``,
            ``deadlock`` or ``memory``.
    """

    rank: int
    position: int
    action: str
    message: str
    rule: str

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}, {self.action}: {self.message}"


def violation_at(table: Table, row: int, rule: str, message: str) -> Violation:
    """Return the violation of ``rule`` by the action of a row."""
    rank = int(table.offsets.searchsorted(row, side="right")) - 1
    return Violation(rank, int(table.position[row]), str(table.action_at(row)), message, rule)
