"""A dump's XML as a row of smaller dumps of whole pages.

Knows that a dump is a head, which names the language and the namespaces, and then pages one after another; and that
nothing else needs to be understood to cut it. So a dump of any size passes through little memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chimera.data.text.streams import open_text
from chimera.errors import DataError

__all__ = ["Chunk", "read_chunks"]

_READ_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 24
_PAGE: Final = b"<page>"
_PAGE_END: Final = b"</page>"
_END: Final = b"</mediawiki>"
_LANGUAGE: Final = re.compile(rb'<mediawiki[^>]*\bxml:lang="([A-Za-z-]+)"')


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some pages as a dump of their own.

    Attributes:
        number: counted from 0.
        content: the XML.
        language: of the dump, as its head says; "en" where it does not.
        position: bytes of the file, compressed as it is, that are read once this chunk is.
    """

    number: int
    content: bytes
    language: str
    position: int


def read_chunks(path: Path) -> Iterator[Chunk]:
    """Read a dump, compressed or not.

    Raises:
        DataError: the file is missing, damaged, cut short, or no dump.
    """
    with open_text(path) as stream:
        head, rest = b"", b""
        while _PAGE not in head:
            block = stream.read(_READ_BYTES)
            if not block:
                raise DataError(
                    f"{path} is no dump of a wiki: it has no <page>; give a file such as "
                    "enwiki-latest-pages-articles.xml.bz2"
                )
            head += block
            _require_dump(path, head)
        head, rest = _with_namespaces(head[: head.index(_PAGE)]), head[head.index(_PAGE) :]
        match = _LANGUAGE.search(head)
        language = match[1].decode() if match else "en"
        number = 0
        ended = _END in rest
        while block := stream.read(_READ_BYTES):
            # The end may lie across the border of two reads.
            ended = ended or _END in rest[-len(_END) :] + block
            rest += block
            if len(rest) < _CHUNK_BYTES:
                continue
            end = rest.rfind(_PAGE_END) + len(_PAGE_END)
            if end < len(_PAGE_END):
                continue  # a page longer than a chunk
            yield Chunk(number, head + rest[:end] + b"\n" + _END, language, stream.position)
            number, rest = number + 1, rest[end:]
        if not ended:
            raise DataError(f"{path} ends without </mediawiki>: it is cut short; copy it again")
        yield Chunk(number, head + rest, language, stream.position)


def _with_namespaces(head: bytes) -> bytes:
    """Return a head that names the namespace of templates; wikiextractor takes every page for one where it does not."""
    if b'key="10"' in head:
        return head
    named = b'<namespaces>\n<namespace key="10">Template</namespace>\n</namespaces>\n</siteinfo>\n'
    return head.replace(b"</siteinfo>", named) if b"</siteinfo>" in head else head + b"<siteinfo>\n" + named


def _require_dump(path: Path, head: bytes) -> None:
    """Refuse early what cannot be one."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:64]
    if not start.startswith((b"<mediawiki", b"<?xml")):
        raise DataError(
            f"{path} is no dump of a wiki in UTF-8: it begins with {start[:24]!r}, needed: <mediawiki; give a file "
            "such as enwiki-latest-pages-articles.xml.bz2"
        )
