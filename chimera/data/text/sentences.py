"""Sentences of a paragraph; this module stands for the package ``sentencex``.

The choice: sentencex is Wikimedia's own segmenter, made for the text of Wikipedia in some 300 languages, kept, under
the MIT licence, compiled, and without models to download.
"""

from functools import partial
from typing import Any, Final

import sentencex

from chimera.errors import UsageError

__all__ = ["sentence_splitter"]

_segment: Final[Any] = sentencex.segment


def _sentences(text: str, language: str) -> list[str]:
    return [sentence.strip() for sentence in _segment(language, text)]


def sentence_splitter(language: str) -> "partial[list[str]]":
    """Return a function from a paragraph to its sentences; a language unknown to the package is split as English.

    Raises:
        UsageError: the language is no code such as "en".
    """
    if not (language.replace("-", "").isalpha() and language.isascii()):
        raise UsageError(f"--language {language!r} is no language code; needed: one such as en, de or zh")
    return partial(_sentences, language=language)
