"""Joining indexed datasets, in the order given and in constant memory."""

from collections.abc import Sequence
from pathlib import Path

from chimera.data.indexed.dataset import IndexedDataset
from chimera.data.indexed.layout import index_path
from chimera.data.indexed.writer import IndexedWriter
from chimera.errors import UsageError

__all__ = ["merge_datasets"]


def merge_datasets(prefixes: Sequence[str | Path], out: str | Path, *, overwrite: bool = False) -> IndexedDataset:
    """Write one dataset with the documents of all, and open it.

    Raises:
        UsageError: fewer than two, one is missing, their tokens are of different types, or ``out`` exists.
        FormatError: one of them cannot be read.
    """
    if len(prefixes) < 2:
        raise UsageError(f"got {len(prefixes)} dataset to merge; needed: two or more")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    token_type = datasets[0].tokens.dtype
    for dataset in datasets:
        path = index_path(dataset.prefix)
        if dataset.tokens.dtype != token_type:
            raise UsageError(
                f"{path} has tokens of type {dataset.tokens.dtype}, {index_path(datasets[0].prefix)} of {token_type}: "
                "they come from different vocabularies; build both with the same"
            )
        if dataset.modes is not None:
            raise UsageError(f"{path} has modes, as multimodal sets do; only text is merged")
    with IndexedWriter(out, token_type, overwrite=overwrite) as writer:
        for dataset in datasets:
            writer.append(dataset)
    return IndexedDataset(out)
