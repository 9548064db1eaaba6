"""How commands print: colour and the terminal's width on a terminal, plain text of a fixed width elsewhere.

It knows no command. Nothing printed here is ever cut off: text is wrapped, tables are as wide as what is in them.
"""

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console

__all__ = ["console", "print_table", "print_wrapped", "table_lines"]

_WIDEST: Final = 120
"""Text wider than this is hard to read; figures may be wider."""
_PIPED: Final = 100


def console(*, on_stderr: bool = False) -> Console:
    """Return a console on the present stdout or stderr that prints text as it is given, coloured only on a terminal."""
    return Console(stderr=on_stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _width_of(out: Console) -> int:
    """Return the columns that text on ``out`` should take."""
    return min(out.width, _WIDEST) if out.is_terminal else _PIPED


def print_wrapped(out: Console, text: str, indent: str = "", first: str | None = None) -> None:
    """Print a paragraph; its first line begins with ``first``, the others with ``indent``."""
    width = _width_of(out)
    begin = indent if first is None else first
    for line in textwrap.wrap(text, width, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False):
        out.print(line)


def print_table(out: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their headings, the first column to the left, the others to the right.

    A heading may have several lines, which stand at the bottom of the head.
    """
    head, body = table_lines(headings, rows)
    for line in head:
        out.print(line, style="bold")
    for line in body:
        out.print(line)


def table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> tuple[list[str], list[str]]:
    """Return the lines of the head and of the rows of a table whose first ``left`` columns stand to the left."""
    split = [heading.split("\n") for heading in headings]
    height = max(map(len, split))
    head = list(zip(*([""] * (height - len(lines)) + lines for lines in split), strict=True))
    widths = [max(map(len, column)) for column in zip(*head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        sized = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(sized).rstrip()

    return [line(cells) for cells in head], [line(cells) for cells in rows]
