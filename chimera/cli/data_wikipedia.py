"""``chimera data wikipedia``: a dump to segmented text."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from chimera.cli.progress import byte_progress
from chimera.cli.terminal import console, print_wrapped
from chimera.data.prepare import usable_cores
from chimera.data.text.documents import Splitter
from chimera.data.wikipedia import segment_wikipedia
from chimera.errors import DataError, UsageError

__all__ = ["data_wikipedia"]

_Dump = Annotated[Path, Positional, arg(metavar="DUMP", help_behavior_hint="")]


def data_wikipedia(
    dump: _Dump,
    *,
    out: Path,
    language: Annotated[str | None, arg(constructor=str, metavar="CODE", help_behavior_hint="")] = None,
    workers: Annotated[int | None, arg(constructor=int, metavar="N", help_behavior_hint="")] = None,
) -> None:
    """Turn a dump of Wikipedia into segmented text, OUT/wikipedia.segmented.txt.

    One sentence stands on each line, and a blank line after each article. Titles, headings, lists, tables and what is
    left of markup are dropped. A run that was stopped goes on where it was when called again.

    Example:
        chimera data wikipedia enwiki-latest-pages-articles.xml.bz2 --out data/wikipedia

    Args:
        dump: XML of articles, compressed or not
        out: folder for the text
        language: of the sentence splitter (default: the dump's own)
        workers: parts of the dump that are worked on at once (default: one per core)
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}; needed: 1 or more")
    with byte_progress("extracting") as report:
        made = segment_wikipedia(
            dump,
            out,
            make_splitter=_splitter,
            language=language,
            workers=workers or usable_cores(),
            report=lambda now: report(now.read_bytes, now.total_bytes),
        )
    reused = f"; {made.num_reused} of {made.num_chunks} parts were done before" if made.num_reused else ""
    print_wrapped(console(), f"{made.path}: {made.num_articles:,} articles, {made.num_sentences:,} sentences{reused}")


def _splitter(language: str) -> Splitter:
    try:
        from chimera.data.text.sentences import sentence_splitter
    except ImportError:
        raise DataError(
            "splitting sentences needs the package sentencex; install chimera-pipeline[wikipedia]"
        ) from None
    return sentence_splitter(language)
