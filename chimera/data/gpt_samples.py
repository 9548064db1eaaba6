"""GPT's samples: pieces of joined documents, each position labelled by the token that follows it."""

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import numpy as np

from chimera.data.index_cache import Inputs
from chimera.data.packing import PackedPieces
from chimera.data.samples import Sample
from chimera.data.tokens import TokenizedDocuments
from chimera.errors import ConfigError

__all__ = ["GptSamples"]


class GptSamples:
    """An endless sequence of samples; see ``PackedPieces`` for what an epoch is.

    Args:
        documents: the corpus; its documents should end in an end-of-document token, which separates them in a sample.
        sequence_length: tokens of a sample.
        seed: 0 or more.
        identity, cache_dir: see ``PackedPieces``.

    Raises:
        ConfigError: a sequence of no token.
        DataError: the corpus is shorter than a sample.
    """

    fields: ClassVar = ("input_ids", "labels")

    __slots__ = ("_pieces", "sequence_length")

    def __init__(
        self,
        documents: TokenizedDocuments,
        *,
        sequence_length: int,
        seed: int,
        identity: Inputs | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        if sequence_length < 1:
            raise ConfigError(f"data.sequence_length is {sequence_length}; it must be 1 or more, 1024 is GPT-2's")
        self.sequence_length = sequence_length
        self._pieces = PackedPieces(
            documents, length=sequence_length + 1, overlap=1, seed=seed, identity=identity, cache_dir=cache_dir
        )

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._pieces)

    def sample(self, index: int, fields: Collection[str]) -> Sample:
        """Make the sample of an index; its fields come together or not at all."""
        return self[index] if fields else {}

    def __getitem__(self, index: int) -> Sample:
        """Make the sample of an index, 0 or more and without an upper end.

        Returns:
            int64 arrays of shape (sequence_length,): ``input_ids``, and ``labels``, the ids one position on.
        """
        if index < 0:
            raise IndexError(f"sample {index}: samples are counted from 0 and have no end to count back from")
        tokens = self._pieces[index].astype(np.int64)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}
