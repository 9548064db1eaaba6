"""Token files of Megatron's indexed format: ``PREFIX.bin`` holds the tokens, ``PREFIX.idx`` where each sequence lies.

``IndexedDataset`` reads one by memory map, ``IndexedWriter`` appends to a new one, and ``merge_datasets`` joins them.
The format is described in ``docs/data.md``.
"""

from chimera.data.indexed.dataset import IndexedDataset
from chimera.data.indexed.merge import merge_datasets
from chimera.data.indexed.writer import IndexedWriter

__all__ = ["IndexedDataset", "IndexedWriter", "merge_datasets"]
