"""Articles out of a small dump, as documents of sentences.

Knows how wikiextractor is run: as a program of its own, by its command line (it is under the AGPL, and is no part of
this one), without expanding templates. And knows which of the lines that it leaves are prose: those that end as a
sentence does and are longer than headings are. Refuses to know how a large dump is divided.
"""

import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from chimera.data.text.documents import Splitter
from chimera.errors import DataError

__all__ = ["extract_articles", "prose"]

_FEWEST_WORDS: Final = 8
_FEWEST_CHARACTERS: Final = 20  # of scripts that put no spaces between words
_SENTENCE_END: Final = re.compile(r"[.!?…。！？।۔؟][\"'”’»)\]]*$")
_TAG: Final = re.compile(r"</?[A-Za-z][^<>]*>")
_REMAINS: Final = re.compile(r"^[|!{*#:;]|\{\{|\}\}|\[\[|\]\]|\{\||\|\}")
# Where a pronunciation or a date was a template, its punctuation is left: "Achilles (;, "Akhilleus",)".
_LEFT_OPEN: Final = re.compile(r"\(\s*[;,:][;,:\s]*")
_LEFT_CLOSE: Final = re.compile(r"[;,:\s]+\)")
_EMPTY: Final = re.compile(r"\(\s*\)|\[\s*\]")


def extract_articles(content: bytes, splitter: Splitter, *, name: str) -> list[list[str]]:
    """Return the articles of a dump that have any prose, each the list of its sentences.

    Args:
        content: the dump's XML.
        splitter: cuts a paragraph into sentences.
        name: stands for the dump in messages.

    Raises:
        DataError: wikiextractor is missing or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pages.xml"
        path.write_bytes(content)
        command = [sys.executable, "-m", "wikiextractor.WikiExtractor", str(path), "--json", "--no-templates"]
        done = subprocess.run(
            [*command, "--processes", "1", "--quiet", "--output", "-"], capture_output=True, check=False
        )
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        hint = "; install chimera-pipeline[wikipedia]" if "No module named" in message else ""
        raise DataError(f"{name}: wikiextractor failed ({message}){hint}")
    texts = (json.loads(line)["text"] for line in done.stdout.decode().split("\n") if line)
    documents = ([s for line in prose(text) for s in splitter(line) if s] for text in texts)
    return [document for document in documents if document]


def prose(text: str) -> list[str]:
    r"""Return the paragraphs of an article; its title, headings, list items and what is left of tables are dropped.

    >>> prose(
    ...     "Achilles\nEtymology.\nHis name (;) is a combination of grief and of a people.\n| table\nPlayed in film by:"
    ... )
    ['His name is a combination of grief and of a people.']
    """
    lines = (_cleaned(line) for line in html.unescape(text).split("\n"))
    return [line for line in lines if _is_prose(line)]


def _cleaned(line: str) -> str:
    line = _TAG.sub("", line)
    line = _LEFT_CLOSE.sub(")", _LEFT_OPEN.sub("(", line))
    line = " ".join(_EMPTY.sub("", line).split())
    return re.sub(r" ([,.;:?!])(?=\s|$)", r"\1", line)


def _is_prose(line: str) -> bool:
    if _REMAINS.search(line) or not _SENTENCE_END.search(line):
        return False
    words = line.count(" ") + 1
    return words >= _FEWEST_WORDS or (words <= 2 and len(line) >= _FEWEST_CHARACTERS and not line.isascii())
