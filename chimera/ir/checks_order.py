"""Order without messages: what a computation needs from its own rank must stand before it.

Needs from other ranks are the subject of ``checks_messages`` and of the proof in ``checks_progress``.
"""

from chimera.ir.rows import Rows
from chimera.ir.violation import Violation, violation_at

__all__ = ["local_order"]


def local_order(rows: Rows) -> list[Violation]:
    """Check every need that is met on the same rank."""
    found = []
    for need in rows.needs():
        local = rows.rank[need.row] == rows.rank[need.producer]
        late = local & (rows.last[need.producer] >= rows.first[need.row])
        for row, producer in zip(need.row[late].tolist(), need.producer[late].tolist(), strict=True):
            needed, position = rows.table.action_at(producer), int(rows.table.position[producer])
            message = f"it needs {needed}, which stands at position {position} of the same rank; move it behind that"
            found.append(violation_at(rows.table, row, "order", message))
    return found
