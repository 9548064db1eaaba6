"""Samples of the inverse cloze task: a sentence, and the block of text that it was taken from.

Knows the task (Lee et al. 2019, section 3.1, "Latent retrieval for weakly supervised open domain question answering"):
one sentence of a block is the query, and mostly it is removed from the block, so that words alone do not tell. Refuses
to know where documents come from.
"""

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.bert_samples import check_sample_options
from chimera.data.index_cache import Arrays, Inputs, kept_arrays
from chimera.data.keyed import NUM_ROUNDS, Purpose, below, keyed_stream, permuted
from chimera.data.samples import Sample
from chimera.data.tokenizer import Vocabulary
from chimera.data.tokens import TokenArray, TokenizedDocuments
from chimera.errors import ConfigError, DataError

__all__ = ["IctSamples"]

_VERSION: Final = 1
_NUM_FRAME_TOKENS: Final = 2  # [CLS] text [SEP]


class IctSamples:
    """An endless sequence of samples; ``len`` of them take a query from every block once.

    A block is as many sentences of a document as fit; one sentence alone is no block. A query that is too long loses
    its end.

    Args:
        documents: the corpus.
        sequence_length: tokens of a block, padding included.
        query_length: tokens of a query, padding included.
        seed: 0 or more.
        vocabulary: the tokenizer's special ids.
        kept_share: share of the samples whose block keeps the query.
        identity, cache_dir: of the index of blocks, see ``PackedPieces``.

    Raises:
        ConfigError: an argument outside its range.
        DataError: no document has two sentences that fit into a block.
    """

    fields: ClassVar = ("query_ids", "query_attention_mask", "block_ids", "block_attention_mask")

    __slots__ = (
        "_blocks",
        "_documents",
        "_epoch",
        "_kept_share",
        "_seed",
        "_vocabulary",
        "query_length",
        "sequence_length",
    )

    def __init__(
        self,
        documents: TokenizedDocuments,
        *,
        sequence_length: int,
        query_length: int,
        seed: int,
        vocabulary: Vocabulary,
        kept_share: float = 0.1,
        identity: Inputs | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        check_sample_options(sequence_length=sequence_length, seed=seed, mlm_probability=0.15)
        if not _NUM_FRAME_TOKENS < query_length <= sequence_length:
            raise ConfigError(
                f"data.query_length is {query_length}; it must be above {_NUM_FRAME_TOKENS} and at most "
                f"data.sequence_length, {sequence_length}"
            )
        if not 0 <= kept_share <= 1:
            raise ConfigError(f"data.query_kept is {kept_share}; it must be between 0 and 1, 0.1 is usual")
        self.sequence_length = sequence_length
        self.query_length = query_length
        self._documents = documents
        self._seed = seed
        self._vocabulary = vocabulary
        self._kept_share = kept_share
        room = sequence_length - _NUM_FRAME_TOKENS
        options: Inputs = {"blocks_version": _VERSION, "room": room}
        arrays = kept_arrays(cache_dir, "blocks", identity, options, lambda: _blocks_of(documents, room))
        self._blocks = arrays["blocks"]
        self._epoch: tuple[int, list[int]] | None = None
        if not len(self._blocks):
            raise DataError(
                f"none of {documents.num_documents} documents has two sentences that fit into {room} tokens; set a "
                "longer data.sequence_length, or divide the corpus into sentences"
            )

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._blocks)

    def sample(self, index: int, fields: Collection[str]) -> Sample:
        """Make the sample of an index; its fields come together or not at all."""
        return self[index] if fields else {}

    def __getitem__(self, index: int) -> Sample:
        """Make the sample of an index, 0 or more and without an upper end.

        Returns:
            int64 arrays: ``query_ids`` and ``query_attention_mask`` of shape (query_length,), ``block_ids`` and
            ``block_attention_mask`` of shape (sequence_length,): [CLS] text [SEP] and padding, and 1 for tokens.
        """
        if index < 0:
            raise IndexError(f"sample {index}: samples are counted from 0 and have no end to count back from")
        epoch, position = divmod(index, len(self._blocks))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, keyed_stream(self._seed, epoch, Purpose.ORDER).random_raw(NUM_ROUNDS).tolist())
        first, end = (int(bound) for bound in self._blocks[permuted(position, len(self._blocks), self._epoch[1])])
        stream = keyed_stream(self._seed, index, Purpose.SAMPLE)
        chosen = first + below(stream, end - first)
        corpus = self._documents
        if below(stream, 1 << 53) * 2.0**-53 < self._kept_share:
            block = corpus.text(first, end)
        else:
            block = np.concatenate((corpus.text(first, chosen), corpus.text(chosen + 1, end)))
        query, query_mask = self._framed(corpus.sentence(chosen), self.query_length)
        block_ids, block_mask = self._framed(block, self.sequence_length)
        return {
            "query_ids": query,
            "query_attention_mask": query_mask,
            "block_ids": block_ids,
            "block_attention_mask": block_mask,
        }

    def _framed(self, text: TokenArray, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[CLS] text [SEP] and padding, and which are tokens."""
        text = text[: length - _NUM_FRAME_TOKENS]
        ids = np.full(length, self._vocabulary.pad, dtype=np.int64)
        ids[0] = self._vocabulary.classify
        ids[1 : len(text) + 1] = text
        ids[len(text) + 1] = self._vocabulary.separate
        mask = np.zeros(length, dtype=np.int64)
        mask[: len(text) + _NUM_FRAME_TOKENS] = 1
        return ids, mask


def _blocks_of(documents: TokenizedDocuments, room: int) -> Arrays:
    found = np.empty((documents.num_sentences // 2, 2), np.int64)
    count = _compiled()(documents.sentence_starts, documents.sentence_ends, documents.document_starts, room, found)
    return {"blocks": found[:count]}


@cache
def _compiled() -> Callable[..., Any]:
    from chimera.data.packing_loops import block_ends

    return block_ends
