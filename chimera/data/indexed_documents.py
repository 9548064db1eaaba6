"""An indexed dataset as the documents that samples are made of, and its division into parts.

Knows how sequences become sentences (empty ones are no sentence) and how documents are divided by ratio; both are made
once and kept as memory maps. Refuses to know what samples do with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.corpus import split_parts
from chimera.data.index_cache import Arrays, Inputs, cached_arrays
from chimera.data.indexed.dataset import IndexedDataset
from chimera.data.indexed.layout import data_path, index_path
from chimera.data.tokens import TokenizedDocuments, starts_of
from chimera.errors import DataError

__all__ = ["IndexedPart", "dataset_identity", "open_parts"]

_VERSION: Final = 1
_END_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class IndexedPart:
    """Some documents of a dataset.

    Attributes:
        documents: them.
        identity: what they are a function of, for caches of what is made of them.
    """

    documents: TokenizedDocuments
    identity: Inputs


def dataset_identity(dataset: IndexedDataset) -> dict[str, str | int | float | bool | None]:
    """Return what tells a dataset from others and from itself after a change: sizes, time, the index's ends."""
    index, data = index_path(dataset.prefix), data_path(dataset.prefix)
    with index.open("rb") as file:
        digest = sha256(file.read(_END_BYTES))
        file.seek(max(0, index.stat().st_size - _END_BYTES))
        digest.update(file.read())
    return {
        "index_ends": digest.hexdigest(),
        "index_bytes": index.stat().st_size,
        "data_bytes": data.stat().st_size,
        "data_changed_ns": data.stat().st_mtime_ns,
    }


def open_parts(
    dataset: IndexedDataset, shares: Sequence[float], *, seed: int, cache_dir: Path
) -> tuple[IndexedPart, ...]:
    """Divide a dataset's documents by ``shares``, which add up to 1; a share of 0 is a part without documents.

    Raises:
        DataError: tokens that are no whole numbers, or a part that would be empty against its share.
    """
    if not np.issubdtype(dataset.tokens.dtype, np.integer):
        raise DataError(f"{data_path(dataset.prefix)} holds {dataset.tokens.dtype}; needed: ids, whole numbers")
    inputs: Inputs = {"version": _VERSION, "kind": "documents", **dataset_identity(dataset)}
    whole = _documents(dataset.tokens, cached_arrays(cache_dir, "documents", inputs, lambda: _sentences(dataset)))
    if len(shares) == 1:
        return (IndexedPart(whole, inputs),)
    parts = []
    for number, chosen in enumerate(_chosen(dataset, shares, seed)):
        if not len(chosen):
            parts.append(IndexedPart(whole.select(chosen), inputs))
            continue
        division: Inputs = {
            **inputs,
            "kind": "part",
            "shares": " ".join(map(repr, shares)),
            "seed": seed,
            "part": number,
        }

        def make(documents: NDArray[np.int64] = chosen) -> Arrays:
            part = whole.select(documents)
            return {
                "sentence_starts": part.sentence_starts,
                "sentence_ends": part.sentence_ends,
                "document_starts": part.document_starts,
            }

        arrays = cached_arrays(cache_dir, "part", division, make)
        parts.append(IndexedPart(_documents(dataset.tokens, arrays), division))
    return tuple(parts)


def _chosen(dataset: IndexedDataset, shares: Sequence[float], seed: int) -> tuple[NDArray[np.int64], ...]:
    try:
        return split_parts(dataset.num_documents, shares, seed=seed)
    except DataError as error:
        raise DataError(f"{index_path(dataset.prefix)}: {error}") from None


def _documents(tokens: NDArray[np.integer], arrays: Arrays) -> TokenizedDocuments:
    return TokenizedDocuments(tokens, arrays["sentence_starts"], arrays["sentence_ends"], arrays["document_starts"])


def _sentences(dataset: IndexedDataset) -> Arrays:
    """Bounds of all sequences that have tokens, and of the documents among them."""
    starts = dataset.offsets // dataset.tokens.itemsize
    kept = dataset.lengths > 0
    before = starts_of(kept.astype(np.int64))
    starts = starts[kept]
    return {
        "sentence_starts": starts,
        "sentence_ends": starts + dataset.lengths[kept],
        "document_starts": before[dataset.document_starts],
    }
