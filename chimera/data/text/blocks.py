"""A text file as a row of blocks that each hold whole documents, in order.

Knows where a file may be cut: after a blank line of segmented text, after any line otherwise, after any row of a table.
So blocks can be worked on apart, and where each begins is known for messages. Refuses to decode or parse them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chimera.data.text.options import TextForm, TextOptions
from chimera.data.text.streams import TextStream, open_text
from chimera.errors import DataError

__all__ = ["Block", "read_blocks"]

_BLOCK_BYTES: Final = 1 << 20
_BORDER_BYTES: Final = 64
_BLANK_LINE: Final = re.compile(rb"\n[ \t\r\f\v]*\n")


@dataclass(frozen=True, slots=True)
class Block:
    """Some whole documents of a file.

    Attributes:
        path: the file.
        first_line: line (of a table: row) at which it begins, counted from 1.
        content: the bytes of the lines; of a table, the texts of the rows.
        num_bytes: of ``content``.
        position: bytes of the file, compressed as it is, that are read once this block is.
    """

    path: str
    first_line: int
    content: bytes | tuple[str | None, ...]
    num_bytes: int
    position: int


def read_blocks(path: Path, options: TextOptions) -> Iterator[Block]:
    """Read a file block by block.

    Raises:
        DataError: the file is missing, unreadable, damaged, or a table without the column.
    """
    if options.form == "parquet":
        yield from _table_blocks(path, options.field)
        return
    line = 1
    with open_text(path) as stream:
        for content in _whole_documents(stream, options.form):
            yield Block(str(path), line, content, len(content), stream.position)
            line += content.count(b"\n")


def _whole_documents(stream: TextStream, form: TextForm) -> Iterator[bytes]:
    """Cut a stream behind the last document that ends in each block read."""
    rest: list[bytes] = []
    while block := stream.read(_BLOCK_BYTES):
        # A blank line may lie across the border of two reads.
        border = rest[-1][-_BORDER_BYTES:] if rest else b""
        end = _last_end(border + block, form)
        if end is None or end <= len(border):
            rest.append(block)
            continue
        end -= len(border)
        yield b"".join((*rest, block[:end]))
        rest = [block[end:]] if end < len(block) else []
    if rest:
        yield b"".join(rest)


def _last_end(block: bytes, form: TextForm) -> int | None:
    """Return where the last whole document of a block ends."""
    if form != "segmented":
        end = block.rfind(b"\n")
        return end + 1 if end >= 0 else None
    end = max(block.rfind(b"\n\n") + 2, block.rfind(b"\n\r\n") + 3)
    if end > 2:
        return end
    ends = [match.end() for match in _BLANK_LINE.finditer(block)]
    return ends[-1] if ends else None


def _table_blocks(path: Path, column: str) -> Iterator[Block]:
    try:
        from chimera.data.text.parquet import column_batches
    except ImportError:
        raise DataError(f"{path}: Parquet needs the package pyarrow; install chimera-pipeline[data]") from None
    row = 1
    for texts, share in column_batches(path, column):
        position = round(share * path.stat().st_size)
        yield Block(str(path), row, texts, sum(len(text) for text in texts if text), position)
        row += len(texts)
