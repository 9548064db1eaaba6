"""Documents of sequences from a block of text.

Knows how each form of text is parsed, and says by file and line what cannot be. Text that is empty gives an empty
document, which is kept. Refuses to know about tokens.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

from chimera.data.text.blocks import Block
from chimera.data.text.options import TextOptions
from chimera.errors import DataError, nearest_names

__all__ = ["Splitter", "decoded", "documents_of", "segmented_documents"]

_SURROGATE: Final = re.compile("[\ud800-\udfff]")

Splitter = Callable[[str], list[str]]


def documents_of(block: Block, options: TextOptions, splitter: Splitter | None = None) -> list[list[str]]:
    """Return the documents of a block, each the list of its sequences.

    Args:
        block: from ``read_blocks`` with the same options.
        options: how to read it.
        splitter: cuts a paragraph into sentences; needed for ``sentences="split"``.

    Raises:
        DataError: bytes that are no UTF-8, a line that is no JSON object, a text that is missing or no text.
    """
    if options.form == "segmented":
        assert isinstance(block.content, bytes), "only tables have texts"
        text = decoded(block.content, name=block.path, first_line=block.first_line)
        documents = segmented_documents(text)
        return [[" ".join(document)] for document in documents] if options.sentences == "document" else documents
    return [_sequences(text, options, splitter) for text in _texts(block, options)]


def segmented_documents(text: str) -> list[list[str]]:
    """Cut segmented text: a sentence per line, a blank line after each document; untidy files are read as meant."""
    documents: list[list[str]] = [[]]
    # A byte-order mark inside the text is left over from files joined end to end; it is no character of a sentence.
    for line in _lines(text.replace("\ufeff", "")):
        sentence = line.strip()
        if sentence:
            documents[-1].append(sentence)
        elif documents[-1]:
            documents.append([])
    if not documents[-1]:
        documents.pop()
    return documents


def decoded(content: bytes, *, name: str, first_line: int = 1) -> str:
    """Decode UTF-8 without NUL characters; ``name`` and ``first_line`` say where the bytes come from.

    Raises:
        DataError: they are something else.
    """
    advice = "a corpus is UTF-8 text; convert other encodings, for instance with `iconv -f UTF-16 -t UTF-8`"
    nul = content.find(b"\0")
    if nul >= 0:
        raise DataError(f"{name} is binary or UTF-16: NUL at {_place(content, nul, first_line)}; {advice}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        place = _place(content, at, first_line)
        raise DataError(f"{name} is not UTF-8: byte 0x{content[at]:02x} at {place}; {advice}") from None


def _texts(block: Block, options: TextOptions) -> Iterator[str]:
    """The text of each document."""
    if isinstance(block.content, tuple):
        for row, text in enumerate(block.content, block.first_line):
            if text is None:
                raise DataError(f"{block.path}: row {row} has no {options.field!r}; leave out rows without text")
            yield text
        return
    text = decoded(block.content, name=block.path, first_line=block.first_line).removeprefix("\ufeff")
    for number, line in enumerate(text.removesuffix("\n").split("\n"), block.first_line):
        if options.form == "lines":
            yield line
        elif line.strip():
            yield _json_text(line, options.field, where=f"{block.path}: line {number}")


def _json_text(line: str, field: str, *, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON ({error}); needed: one object per line") from None
    if not isinstance(value, dict):
        raise DataError(f"{where} is a JSON {type(value).__name__}; needed: one object per line")
    if field not in value:
        raise DataError(
            f"{where} has no field {field!r}{nearest_names(field, value)}; it has {', '.join(value) or 'none'}: name "
            "the one that holds the text with --field"
        )
    text = value[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is a JSON {type(text).__name__}; needed: text")
    surrogate = _SURROGATE.search(text)
    if surrogate:
        raise DataError(
            f"{where}: field {field!r} has half a surrogate pair, \\u{ord(surrogate[0]):04x}, which is no character; "
            "remove it, or write the whole pair"
        )
    return text


def _sequences(text: str, options: TextOptions, splitter: Splitter | None) -> list[str]:
    if options.sentences == "document":
        return [text] if text.strip() else []
    lines = [line.strip() for line in _lines(text)]
    if options.sentences == "split":
        assert splitter is not None, "a splitter was made for --sentences split"
        lines = [sentence.strip() for sentence in chain.from_iterable(splitter(line) for line in lines if line)]
    return [line for line in lines if line]


def _lines(text: str) -> list[str]:
    """Lines by any of the three usual ends; unlike ``splitlines`` by nothing else."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _place(content: bytes, offset: int, first_line: int) -> str:
    """Where a byte stands, counted from one."""
    line_start = content.rfind(b"\n", 0, offset) + 1
    line = first_line + content.count(b"\n", 0, offset)
    return f"line {line}, byte {offset - line_start + 1}"
