"""A whole dump, chunk by chunk, on several processes, and again from where it was stopped.

Knows how the work is kept: every chunk's documents in a file of their own, which appears by rename, so that a run that
was stopped goes on with the chunks that are missing; and joins them at the end. Refuses to know how an article becomes
sentences.
"""

import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chimera.data.text.documents import Splitter
from chimera.data.wikipedia.articles import extract_articles
from chimera.data.wikipedia.dump import Chunk, read_chunks
from chimera.errors import DataError, UsageError

__all__ = ["OUTPUT", "WikipediaProgress", "WikipediaResult", "segment_wikipedia"]

OUTPUT: Final = "wikipedia.segmented.txt"
_PARTS: Final = "parts"
_SOURCE: Final = "source.json"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class WikipediaProgress:
    """How far a run is.

    Attributes:
        read_bytes: of the dump, compressed as it is.
        total_bytes: likewise.
        num_articles: written so far.
    """

    read_bytes: int
    total_bytes: int
    num_articles: int


@dataclass(frozen=True, slots=True)
class WikipediaResult:
    """What a run made.

    Attributes:
        path: the segmented text.
        num_articles, num_sentences: in it.
        num_reused: chunks that an earlier run had done.
        num_chunks: of the dump.
    """

    path: Path
    num_articles: int
    num_sentences: int
    num_reused: int
    num_chunks: int


def segment_wikipedia(
    dump: Path,
    out: Path,
    *,
    make_splitter: Callable[[str], Splitter],
    language: str | None = None,
    workers: int = 1,
    report: Callable[[WikipediaProgress], None] | None = None,
) -> WikipediaResult:
    """Write the articles of a dump as segmented text, ``OUT/wikipedia.segmented.txt``.

    Args:
        dump: XML, compressed or not.
        out: folder; made if need be. One of a run that was stopped is gone on with.
        make_splitter: makes a sentence splitter for a language.
        language: of the splitter; the dump's own when not given.
        workers: chunks that are worked on at once.
        report: called after each chunk.

    Raises:
        UsageError: the folder holds a finished text, or parts of another dump.
        DataError: a dump that cannot be read, or without a single article.
    """
    target = out / OUTPUT
    if target.exists():
        raise UsageError(f"{target} exists; give another folder, or remove the file to make it again")
    if not dump.is_file():
        raise DataError(f"{dump} {'is a folder' if dump.is_dir() else 'does not exist'}; give the file of a dump")
    parts = out / _PARTS
    parts.mkdir(parents=True, exist_ok=True)
    _claim(parts, dump, language)
    total = dump.stat().st_size
    articles = sentences = reused = count = 0
    done: list[Path] = []
    for chunk, part, was_there in _worked(
        read_chunks(dump), parts, make_splitter=make_splitter, language=language, workers=workers, name=str(dump)
    ):
        found = _count(part)
        articles, sentences = articles + found[0], sentences + found[1]
        reused, count = reused + was_there, count + 1
        done.append(part)
        if report is not None:
            report(WikipediaProgress(chunk.position, total, articles))
    if not articles:
        raise DataError(f"{dump} has no article with prose; is it a dump of articles (pages-articles)?")
    _join(done, target)
    shutil.rmtree(parts)
    return WikipediaResult(target, articles, sentences, reused, count)


def _claim(parts: Path, dump: Path, language: str | None) -> None:
    """Note what the parts are made of, or refuse a folder with parts of something else."""
    stat = dump.stat()
    source = {
        "version": _VERSION,
        "dump": dump.name,
        "bytes": stat.st_size,
        "changed_ns": stat.st_mtime_ns,
        "language": language,
    }
    path = parts / _SOURCE
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != source:
            raise UsageError(
                f"{parts} holds parts of another dump or with another --language; give another folder, or remove it"
            )
        return
    path.write_text(json.dumps(source), encoding="utf-8")


def _worked(
    chunks: Iterator[Chunk],
    parts: Path,
    *,
    make_splitter: Callable[[str], Splitter],
    language: str | None,
    workers: int,
    name: str,
) -> Iterator[tuple[Chunk, Path, bool]]:
    """Yield chunks in order with the file of each, and whether it was there; few are under way at once."""
    waiting: deque[tuple[Chunk, Path, Future[None] | None]] = deque()

    def first() -> tuple[Chunk, Path, bool]:
        chunk, part, future = waiting.popleft()
        if future is not None:
            future.result()
        return chunk, part, future is None

    def work(chunk: Chunk, part: Path) -> None:
        splitter = make_splitter(language or chunk.language)
        documents = extract_articles(chunk.content, splitter, name=f"{name}, chunk {chunk.number + 1}")
        _write(part, documents)

    # Threads, since extraction is a process of its own and the splitter compiled code.
    with ThreadPoolExecutor(workers) as pool:
        try:
            for chunk in chunks:
                part = parts / f"{chunk.number:06}.txt"
                waiting.append((chunk, part, None if part.exists() else pool.submit(work, chunk, part)))
                if len(waiting) > workers:
                    yield first()
            while waiting:
                yield first()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _write(part: Path, documents: list[list[str]]) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=part.parent, suffix=".tmp", delete=False) as file:
        try:
            for document in documents:
                file.write("\n".join(document) + "\n\n")
            file.close()
            Path(file.name).chmod(0o644)
            Path(file.name).replace(part)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _count(part: Path) -> tuple[int, int]:
    """Count a part's documents and sentences."""
    content = part.read_bytes()
    documents = content.count(b"\n\n")
    return documents, content.count(b"\n") - documents


def _join(parts: list[Path], target: Path) -> None:
    temporary = target.with_suffix(".tmp")
    with temporary.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 24)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(target)
