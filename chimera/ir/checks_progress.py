"""The proof that a schedule runs to its end under blocking semantics.

RECV posts a buffer and returns; SEND returns when the peer has posted the matching RECV; F, B and I wait for their
data. Without sends and receives the same proof runs on the dependencies themselves. Each row waits for at most one row
of another rank, so one pass over the programs decides; it takes a schedule whose other checks have passed.
"""

import numpy as np
from numpy.typing import NDArray

from chimera.ir.checks_messages import Messages
from chimera.ir.rows import NOTHING, Rows
from chimera.ir.violation import Violation, violation_at

__all__ = ["deadlock", "stuck_rows", "waits_for"]


def waits_for(rows: Rows, messages: Messages | None) -> NDArray[np.int64]:
    """Return for each row the row of another rank whose end it waits for, or ``NOTHING``.

    Args:
        rows: a complete schedule.
        messages: its sends and receives where it is lowered; a computation then waits for the send of its data.
    """
    waits = np.full(len(rows.table), NOTHING, np.int64)
    if messages is not None:
        waits[messages.send] = messages.receive
        waits[messages.consumer] = messages.send
        return waits
    for need in rows.needs():
        crosses = rows.rank[need.row] != rows.rank[need.producer]
        waits[need.row[crosses]] = rows.last[need.producer[crosses]]
    return waits


def stuck_rows(waits: NDArray[np.int64], offsets: NDArray[np.int64]) -> list[int]:
    """Run the programs as far as they come and return the row where each rank stops: its end, unless it is stuck."""
    cursor: list[int] = offsets[:-1].tolist()
    ends: list[int] = offsets[1:].tolist()
    size = len(waits)
    wanted: list[int] = np.where(waits == NOTHING, size, waits).tolist()
    done = bytearray(size) + b"\1"  # the extra one is what rows without a wait ask for
    sleepers: dict[int, list[int]] = {}
    runnable = list(range(len(cursor)))
    while runnable:
        rank = runnable.pop()
        row, end = cursor[rank], ends[rank]
        while row < end:
            if not done[wanted[row]]:
                sleepers.setdefault(wanted[row], []).append(rank)
                break
            done[row] = 1
            if row in sleepers:
                runnable.extend(sleepers.pop(row))
            row += 1
        cursor[rank] = row
    return cursor


def deadlock(rows: Rows, messages: Messages | None) -> list[Violation]:
    """Check that the programs run to their end; if not, return the cycle of ranks that wait for each other."""
    waits = waits_for(rows, messages)
    stops = stuck_rows(waits, rows.table.offsets)
    if stops == rows.table.offsets[1:].tolist():
        return []
    cycle = _cycle(rows, waits, stops)
    return [_waiting(rows, stops[rank], int(waits[stops[rank]]), stops, len(cycle)) for rank in cycle]


def _cycle(rows: Rows, waits: NDArray[np.int64], stops: list[int]) -> list[int]:
    """Follow who waits for whom from a stuck rank until a rank comes again; start at the cycle's lowest rank."""
    ends = rows.table.offsets[1:].tolist()
    rank = next(r for r, stop in enumerate(stops) if stop != ends[r])
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = int(rows.rank[waits[stops[rank]]])
    cycle = path[path.index(rank) :]
    lowest = cycle.index(min(cycle))
    return cycle[lowest:] + cycle[:lowest]


def _waiting(rows: Rows, row: int, wanted: int, stops: list[int], length: int) -> Violation:
    table = rows.table
    peer = int(rows.rank[wanted])
    place = f"{table.action_at(wanted)} of rank {peer} at position {table.position[wanted]}"
    stop = stops[peer]
    blocked = f"rank {peer} is itself waiting at position {table.position[stop]} ({table.action_at(stop)})"
    advice = f"a cycle of {length} ranks; reorder one of them"
    return violation_at(table, row, "deadlock", f"waits for {place}, but {blocked}: {advice}")
