"""The order grid: one row of plain text per rank, one column per position, with marks where something is wrong.

It shows order, not time; timelines have their own pictures. Long programs show only what is near the marks.
"""

from collections.abc import Iterable

from chimera.ir.schedule import Schedule

__all__ = ["grid_text"]

_NEAR_POSITIONS = 3
_NEAR_RANKS = 1
_GAP = "…"


def grid_text(
    schedule: Schedule,
    marks: Iterable[tuple[int, int]] = (),
    *,
    max_ranks: int = 16,
    max_positions: int = 24,
    label: str = "<-- HERE",
) -> str:
    """Draw a schedule's programs; a mark (rank, position) puts ``label`` behind that cell, or behind a program's end.

    Where there are more ranks or positions than given, only those near a mark are shown (the first ones without marks),
    and an ellipsis stands for what is left out.

    >>> print(grid_text(Schedule.from_text(["0F0 0B0", "1B0 1F0"], routes=[[0, 1]]), [(1, 0)]))
    position  0             1
    rank 0    0F0           0B0
    rank 1    1B0 <-- HERE  1F0
    """
    programs, marked = schedule.actions, set(marks)
    positions = max([*(len(program) for program in programs), *(position + 1 for _, position in marked)], default=0)
    columns = _shown(positions, {position for _, position in marked}, _NEAR_POSITIONS, max_positions)
    ranks = _shown(len(programs), {rank for rank, _ in marked}, _NEAR_RANKS, max_ranks)

    def cell(rank: int, position: int) -> str:
        text = str(programs[rank][position]) if position < len(programs[rank]) else ""
        return f"{text} {label}".strip() if (rank, position) in marked else text

    table = [["position", *(_GAP if p is None else str(p) for p in columns)]]
    for rank in ranks:
        if rank is None:
            table.append([_GAP])
        else:
            table.append([f"rank {rank}", *(_GAP if p is None else cell(rank, p) for p in columns)])
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip() for row in table
    )


def _shown(count: int, marked: set[int], near: int, most: int) -> list[int | None]:
    """Return the numbers to show out of ``range(count)``, None for each run that is left out."""
    if count <= most:
        return list(range(count))
    wanted = {n for mark in marked for n in range(mark - near, mark + near + 1)} if marked else set(range(most))
    shown: list[int | None] = []
    previous = -1
    for number in sorted(n for n in wanted if 0 <= n < count):
        if number != previous + 1:
            shown.append(None)
        shown.append(number)
        previous = number
    return shown if previous == count - 1 else [*shown, None]
