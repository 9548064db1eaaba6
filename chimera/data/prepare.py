"""From text files to an indexed dataset, on as many processes as are given.

Knows the order of the work: the text is read in blocks here, made into tokens by others, and written here in the order
in which it was read, so that the dataset is the same for any number of processes. What reads behind never grows: only a
few blocks per process are under way. Refuses to know how text is parsed, tokenised or stored.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.indexed.dataset import IndexedDataset
from chimera.data.indexed.layout import token_type_for
from chimera.data.indexed.writer import IndexedWriter
from chimera.data.text.blocks import Block, read_blocks
from chimera.data.text.documents import Splitter, documents_of
from chimera.data.text.options import TextOptions
from chimera.data.text_tokenizer import TextTokenizer
from chimera.errors import DataError, UsageError

__all__ = ["BuildProgress", "Prepared", "build_dataset", "forkserver", "tokenizer_path", "usable_cores"]

_BLOCKS_PER_WORKER: Final = 3


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        path: the file that is read.
        read_bytes: of all files, compressed as they are.
        total_bytes: likewise.
        text_bytes: of the text that was written so far.
        num_documents, num_tokens: written so far.
    """

    path: str
    read_bytes: int
    total_bytes: int
    text_bytes: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a build made.

    Attributes:
        dataset: opened again.
        num_empty_documents: documents without a token; they are in the dataset.
        num_empty_sequences: sequences without a token, which are not.
        text_bytes: of the text read.
    """

    dataset: IndexedDataset
    num_empty_documents: int
    num_empty_sequences: int
    text_bytes: int


@dataclass(frozen=True, slots=True)
class _Job:
    """What every process is told once."""

    tokenizer: str
    options: TextOptions
    end_token: int | None
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class _Tokenised:
    """A block as tokens; see ``IndexedWriter.add``."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    sequences_per_document: NDArray[np.int64]
    num_empty_sequences: int


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forkserver() -> ForkServerContext:
    """Return the context of worker processes.

    They are forked from a server that has no threads, neither this process's nor a tokenizer's; where this starts the
    server, it has loaded already what workers need.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chimera.data"])
    return context


def tokenizer_path(prefix: Path) -> Path:
    """Return where a dataset's tokenizer.json lies."""
    return prefix.with_name(f"{prefix.name}.tokenizer.json")


def build_dataset(
    inputs: Sequence[Path],
    out: Path,
    *,
    tokenizer: TextTokenizer,
    options: TextOptions,
    end_token: int | None = None,
    workers: int = 1,
    overwrite: bool = False,
    report: Callable[[BuildProgress], None] | None = None,
) -> Prepared:
    """Tokenise text files into one dataset, in the order given; its tokenizer.json is written beside it.

    Args:
        inputs: files of one form, each compressed or not.
        out: common part of the names of the dataset's files.
        tokenizer: text to ids.
        options: how the text is read.
        end_token: id that is appended to the last sequence of each document; None for none.
        workers: processes that tokenise, beside this one that reads and writes; with 1 this one does all.
        overwrite: whether to replace a dataset of that name.
        report: called after each block.

    Raises:
        UsageError: no input, or ``out`` exists.
        DataError: a file that cannot be read, by name and line; no document with a token. Nothing is left behind.
    """
    if not inputs:
        raise UsageError("no input; give one or more text files")
    dtype = token_type_for(tokenizer.size)
    job = _Job(tokenizer.to_json(), options, end_token, dtype)
    total = sum(path.stat().st_size for path in inputs if path.is_file())
    empty_documents = empty_sequences = text_bytes = before = 0
    with IndexedWriter(out, dtype, overwrite=overwrite) as writer:
        for path in inputs:
            for block, made in _tokenised(read_blocks(path, options), job, workers):
                writer.add(made.tokens, made.lengths, made.sequences_per_document)
                empty_documents += int((made.sequences_per_document == 0).sum())
                empty_sequences += made.num_empty_sequences
                text_bytes += block.num_bytes
                if report is not None:
                    position = before + block.position
                    report(
                        BuildProgress(str(path), position, total, text_bytes, writer.num_documents, writer.num_tokens)
                    )
            before += path.stat().st_size
        if not writer.num_tokens:
            raise DataError(
                f"no document with a token in {', '.join(map(str, inputs))}: {writer.num_documents} empty "
                "document(s); is it the right file, --form and --field?"
            )
    prefix = writer.prefix
    tokenizer_path(prefix).write_text(job.tokenizer, encoding="utf-8")
    return Prepared(IndexedDataset(prefix), empty_documents, empty_sequences, text_bytes)


class _Worker:
    """Makes tokens of blocks."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._tokenizer = TextTokenizer.from_json(job.tokenizer)
        self._splitter = _splitter(job.options)

    def __call__(self, block: Block) -> _Tokenised:
        documents = documents_of(block, self._job.options, self._splitter)
        sequences = list(chain.from_iterable(documents))
        tokens, lengths = self._tokenizer.encode_flat(sequences, self._job.dtype)
        owners = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
        kept = lengths > 0
        counts = np.bincount(owners[kept], minlength=len(documents)).astype(np.int64)
        lengths = lengths[kept]
        if self._job.end_token is not None:
            last = np.cumsum(counts)[counts > 0] - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self._job.end_token)
            lengths[last] += 1
        return _Tokenised(tokens, lengths, counts, int((~kept).sum()))


def _splitter(options: TextOptions) -> Splitter | None:
    if options.sentences != "split":
        return None
    try:
        from chimera.data.text.sentences import sentence_splitter
    except ImportError:
        raise DataError("splitting sentences needs the package sentencex; install chimera-pipeline[data]") from None
    return sentence_splitter(options.language)


def _tokenised(blocks: Iterable[Block], job: _Job, workers: int) -> Iterator[tuple[Block, _Tokenised]]:
    """Yield blocks in order, with their tokens."""
    if workers <= 1:
        worker = _Worker(job)
        for block in blocks:
            yield block, worker(block)
        return
    waiting: deque[tuple[Block, Future[_Tokenised]]] = deque()
    with ProcessPoolExecutor(workers, mp_context=forkserver(), initializer=_begin, initargs=(job,)) as pool:
        try:
            for block in blocks:
                waiting.append((block, pool.submit(_work, block)))
                if len(waiting) >= workers * _BLOCKS_PER_WORKER:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(block: Block, future: "Future[_Tokenised]") -> tuple[Block, _Tokenised]:
    try:
        return block, future.result()
    except BrokenProcessPool:
        raise DataError(
            f"{block.path}: a process died on the documents from line {block.first_line} on, or before; it may have "
            "run out of memory: try fewer --workers"
        ) from None


class _Here:
    """The worker of a process of the pool."""

    worker: _Worker | None = None


def _begin(job: _Job) -> None:
    # The processes are the parallelism; threads beneath them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Here.worker = _Worker(job)


def _work(block: Block) -> _Tokenised:
    assert _Here.worker is not None, "the initializer ran"
    return _Here.worker(block)
