"""Segmented text: one sentence per line, a blank line after each document.

Knows how such a file is read, decompressed, checked and divided into training and held-out documents, and where the
bundled English corpus lies. Refuses to know about tokens: a sentence is a string here. The format is the one that
Google's BERT, NVIDIA's BERT and Chimera's ``wikipedia.segmented.nltk.txt`` share. Real files are not always tidy, so
leading, repeated and missing blank lines, lines of spaces, CRLF and byte-order marks are all read as what they mean;
a file that cannot be meant is an error that says what to do.
"""

import io
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chimera.data.keyed import Purpose, below, keyed_stream
from chimera.data.text.documents import decoded, segmented_documents
from chimera.data.text.streams import uncompressed
from chimera.errors import DataError

__all__ = [
    "bundled_corpus_path",
    "decompress",
    "parse_segmented_text",
    "read_bytes",
    "read_segmented_text",
    "split_documents",
    "split_parts",
]

_FORMAT_ADVICE = (
    "segmented text has one sentence per line and one blank line after each document; "
    'set data.corpus to such a file, or to "bundled" for the English corpus that comes with chimera'
)


def bundled_corpus_path() -> Traversable:
    """Return the bundled English corpus, compressed segmented text; origin and licence are in the README beside it."""
    return resources.files("chimera.data") / "corpora" / "english.segmented.txt.bz2"


def read_segmented_text(path: str | Path | Traversable) -> list[list[str]]:
    """Read a corpus, plain or compressed by gzip, xz, bzip2 or Zstandard.

    Returns:
        The documents in the file's order, each the list of its sentences. Documents of one sentence are kept.

    Raises:
        DataError: the file is missing, a folder, unreadable, empty, damaged or not UTF-8 text, or none of its
            documents has two sentences.
    """
    source = Path(path) if isinstance(path, str) else path
    return parse_segmented_text(decompress(read_bytes(source), name=str(source)), name=str(source))


def parse_segmented_text(data: bytes, *, name: str) -> list[list[str]]:
    """Cut UTF-8 bytes into documents of sentences; ``name`` stands for the file in messages.

    Raises:
        DataError: as ``read_segmented_text``.
    """
    documents = segmented_documents(decoded(data, name=f"corpus {name}"))
    _require_sentence_pairs(documents, name=name)
    return documents


def split_documents(
    num_documents: int, *, heldout_fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide document indices into training and held-out ones.

    The documents are cut, in the file's order, into as many equal runs as there are documents to hold out, and one
    random document of each run is held out. So every part of a corpus of several sources has its share.

    Returns:
        Indices of the training documents and of the held-out documents, both ascending.

    Raises:
        DataError: one side would be empty.
    """
    num_heldout = round(heldout_fraction * num_documents)
    if not 0 < num_heldout < num_documents:
        raise DataError(
            f"{num_documents} document(s) and data.heldout_fraction {heldout_fraction} give "
            f"{num_documents - num_heldout} training and {num_heldout} held-out documents; each side needs at least "
            "one: set data.heldout_fraction so that it does, or use a corpus of more documents"
        )
    heldout = _one_of_each_run(num_documents, num_heldout, keyed_stream(seed, 0, Purpose.SPLIT))
    return np.flatnonzero(~heldout), np.flatnonzero(heldout)


def split_parts(num_documents: int, shares: Sequence[float], *, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Divide document indices into parts, the first of which is what the others leave.

    Each later part takes one random document of each of as many equal runs of what is left as it has documents.

    Args:
        num_documents: documents in all.
        shares: of each part; they add up to 1. A share of 0 gives no documents.
        seed: of the choice.

    Raises:
        DataError: a part with a share above 0 would be empty.
    """
    left = np.arange(num_documents, dtype=np.int64)
    parts: list[NDArray[np.int64]] = []
    for number, share in enumerate(shares[1:]):
        count = round(share * num_documents)
        if share and not 0 < count < len(left):
            raise DataError(
                f"{num_documents} document(s) cannot be divided by {', '.join(map(str, shares))}: part {number + 2} "
                f"would have {count}; set larger or fewer parts, or use a corpus of more documents"
            )
        taken = _one_of_each_run(len(left), count, keyed_stream(seed, number, Purpose.SPLIT))
        parts.append(left[taken])
        left = left[~taken]
    return (left, *parts)


def _one_of_each_run(num_documents: int, num_chosen: int, stream: np.random.Philox) -> NDArray[np.bool_]:
    """Choose one random document of each of ``num_chosen`` equal runs."""
    chosen = np.zeros(num_documents, dtype=bool)
    if num_chosen:
        run_starts = np.arange(num_chosen + 1, dtype=np.int64) * num_documents // num_chosen
        chosen[[first + below(stream, int(end - first)) for first, end in pairwise(run_starts)]] = True
    return chosen


def read_bytes(path: Path | Traversable) -> bytes:
    """Return a corpus file's bytes, compressed or not.

    Raises:
        DataError: the file is missing, a folder or unreadable.
    """
    if path.is_dir():
        raise DataError(f"corpus {path} is a folder, a file is needed; set data.corpus to one file in it")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"corpus {path} does not exist; {_FORMAT_ADVICE}") from None
    except OSError as error:
        raise DataError(f"corpus {path} cannot be read: {error.strerror}; check its permissions") from error


def decompress(data: bytes, *, name: str) -> bytes:
    """Return the text's bytes: decompressed if they start as compressed files do, else as they are.

    Raises:
        DataError: they are compressed, but damaged; ``name`` stands for the file.
    """
    return uncompressed(io.BytesIO(data), name=f"corpus {name}").read()


def _require_sentence_pairs(documents: list[list[str]], *, name: str) -> None:
    """Refuse a corpus in which no sentence has a next one."""
    if not documents:
        raise DataError(f"corpus {name} is empty: it holds no sentence; {_FORMAT_ADVICE}")
    if all(len(document) < 2 for document in documents):
        raise DataError(
            f"corpus {name} has {len(documents)} document(s) but none of two sentences, so no sentence has a next one; "
            "a blank line after every sentence makes every document a single sentence: put the sentences of a document "
            "on successive lines and a blank line only after its last"
        )
