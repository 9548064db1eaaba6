"""BERT's pre-training samples: two segments, masked words, and how the second stands to the first.

Knows how the two segments are found (Devlin et al. 2019, section 3.1 and appendix A.2, and google-research/bert's
``create_pretraining_data.py``) and makes each one a pure function of (seed, index): no state, no order, the same in
every process. Refuses to know about files, batches and steps. Two things differ from the original on purpose: a random
second segment never is the true continuation, and short sequences are not sprinkled in.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from chimera.data.index_cache import Inputs, kept_arrays
from chimera.data.keyed import NUM_ROUNDS, Purpose, below, keyed_stream, permuted
from chimera.data.masking import IGNORED_LABEL, Masking, Words
from chimera.data.tokenizer import Vocabulary
from chimera.data.tokens import TokenArray, TokenizedDocuments
from chimera.errors import ConfigError, DataError

__all__ = [
    "IGNORED_LABEL",
    "NUM_FRAME_TOKENS",
    "BertSamples",
    "Pairs",
    "check_sample_options",
]

NUM_FRAME_TOKENS = 3  # [CLS] A [SEP] B [SEP]
_IS_NEXT, _IS_OTHER = 0, 1

Pairs = Literal["next", "order"]

# A segment equal to the true continuation is met in one draw of thousands, so this many in a row mean that the other
# documents hold nothing else.
_MAX_DRAWS = 16


class BertSamples:
    """An endless sequence of samples over a tokenised corpus; ``len`` of them start at every possible sentence once.

    A sample starts at a sentence that is not its document's last. The sentences from there, until they fill the
    sequence or the document ends, are cut at a random sentence boundary into A and B. Half of the samples replace B by
    as many sentences as fit from a random place in another document; there every sentence is equally likely, so
    documents of one sentence serve as B but never as A. A pair that is too long loses tokens of its longer segment, at
    either end, one by one. Then 15 % of the word pieces, at least one, are chosen to be predicted.

    With ``pairs="order"`` the other half of the samples swap A and B (Lan et al. 2019, ALBERT): both come from one
    document, and documents of one sentence serve for nothing.

    Args:
        documents: the corpus.
        sequence_length: tokens of a sample, padding included.
        seed: 0 or more.
        vocabulary: the tokenizer's special ids and size.
        mlm_probability: share of the word pieces to predict.
        pairs: what the second label asks: whether B is the "next" segment, or whether A and B are in "order".
        words: where words begin and how long masked stretches are; single word pieces when not given.
        identity: what the documents are a function of; None keeps no files.
        cache_dir: where the index of first sentences is kept.

    Raises:
        ConfigError: an argument outside its range.
        DataError: fewer than two documents with text, no document with two sentences, or no word but unknown ones.
    """

    fields: ClassVar = ("input_ids", "token_type_ids", "attention_mask", "mlm_labels", "nsp_labels")

    __slots__ = (
        "_documents",
        "_epoch",
        "_masking",
        "_pairs",
        "_seed",
        "_starts",
        "_vocabulary",
        "sequence_length",
    )

    def __init__(
        self,
        documents: TokenizedDocuments,
        *,
        sequence_length: int,
        seed: int,
        vocabulary: Vocabulary,
        mlm_probability: float = 0.15,
        pairs: Pairs = "next",
        words: Words | None = None,
        identity: Inputs | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        check_sample_options(sequence_length=sequence_length, seed=seed, mlm_probability=mlm_probability)
        self.sequence_length = sequence_length
        self._documents = documents
        self._seed = seed
        self._vocabulary = vocabulary
        self._pairs = pairs
        self._masking = Masking(vocabulary, share=mlm_probability, words=words)
        least = 2 if pairs == "next" else 1
        options: Inputs = {"starts_version": 1, "pairs": pairs}
        arrays = kept_arrays(
            cache_dir, "starts", identity, options, lambda: {"starts": _first_sentences(documents, at_least=least)}
        )
        self._starts = arrays["starts"]
        self._epoch: tuple[int, list[int]] | None = None
        if not any(self._masking.maskable[block].any() for block in documents.token_blocks()):
            raise DataError("no sentence has a word piece of the vocabulary, all are unknown: it is another language's")

    def __len__(self) -> int:
        """Samples of one epoch; indices beyond it give new samples of the same sentences."""
        return len(self._starts)

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int64]]]:
        """Go through the first epoch."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Make the sample of an index, 0 or more and without an upper end.

        Returns:
            int64 arrays. Of shape (sequence_length,): ``input_ids``; ``token_type_ids``, 0 for [CLS] A [SEP] and the
            padding, 1 for B [SEP]; ``attention_mask``, 1 for tokens and 0 for padding; ``mlm_labels``, the original
            ids of the chosen tokens and −100 elsewhere. Of shape (): ``nsp_labels``, 0 if B follows A, 1 if not.
        """
        return self.sample(index, self.fields)

    def sample(self, index: int, fields: Collection[str]) -> dict[str, NDArray[np.int64]]:
        """Make the sample with at least these fields; tokens are hidden where ids or labels are asked for."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are counted from 0 and have no end to count back from")
        stream = keyed_stream(self._seed, index, Purpose.SAMPLE)
        first, second, label = self._pair(self._start(index), stream)
        sample = self._framed(first, second)
        if "input_ids" in fields or "mlm_labels" in fields:
            sample["mlm_labels"] = self._masking.apply(sample["input_ids"], stream)
        sample["nsp_labels"] = np.array(label, dtype=np.int64)
        return sample

    def _start(self, index: int) -> int:
        """The first sentence of A: every epoch meets each once, in an order of its own."""
        epoch, position = divmod(index, len(self._starts))
        # Only saves drawing the keys again; they are a function of seed and epoch.
        known = self._epoch
        if known is None or known[0] != epoch:
            known = (epoch, keyed_stream(self._seed, epoch, Purpose.ORDER).random_raw(NUM_ROUNDS).tolist())
            self._epoch = known
        return int(self._starts[permuted(position, len(self._starts), known[1])])

    def _pair(self, start: int, stream: np.random.Philox) -> tuple[TokenArray, TokenArray, int]:
        """Segments A and B, cut to fit, and the next-sentence label."""
        corpus = self._documents
        document = self._document_of(start)
        end = self._filled(start, self.sequence_length - NUM_FRAME_TOKENS, at_least=2)
        middle = start + 1 + below(stream, end - start - 1)
        first = corpus.text(start, middle)
        other = below(stream, 2) == _IS_OTHER
        if other and self._pairs == "order":
            a, b = self._cut(corpus.text(middle, end), first, stream)
            return a, b, _IS_OTHER
        if other:
            following = corpus.text(middle, int(corpus.document_starts[document + 1]))
            for _ in range(_MAX_DRAWS):
                a, b = self._cut(first, self._random_segment(document, len(first), stream), stream)
                if not _one_begins_with_other(b, following):
                    return a, b, _IS_OTHER
        second = corpus.text(middle, end)
        return *self._cut(first, second, stream), _IS_NEXT

    def _random_segment(self, document: int, first_length: int, stream: np.random.Philox) -> TokenArray:
        """Sentences from a random place outside the document, as many as fit beside A."""
        corpus = self._documents
        skipped_from, skipped_to = (int(bound) for bound in corpus.document_starts[document : document + 2])
        start = below(stream, corpus.num_sentences - (skipped_to - skipped_from))
        if start >= skipped_from:
            start += skipped_to - skipped_from
        end = self._filled(start, self.sequence_length - NUM_FRAME_TOKENS - first_length, at_least=1)
        return corpus.text(start, end)

    def _document_of(self, sentence: int) -> int:
        """The document that holds a sentence."""
        return int(self._documents.document_starts.searchsorted(sentence, side="right")) - 1

    def _filled(self, start: int, num_tokens: int, *, at_least: int) -> int:
        """The end of the sentences that from ``start`` on fill ``num_tokens``, inside its document."""
        corpus = self._documents
        reached = int(corpus.sentence_starts.searchsorted(corpus.sentence_starts[start] + num_tokens))
        document_end = int(corpus.document_starts[self._document_of(start) + 1])
        return min(document_end, max(start + at_least, reached))

    def _cut(self, first: TokenArray, second: TokenArray, stream: np.random.Philox) -> tuple[TokenArray, TokenArray]:
        """Take tokens from the longer segment until the pair fits; from B while they are equally long."""
        room = self.sequence_length - NUM_FRAME_TOKENS
        if len(first) + len(second) <= room:
            return first, second
        first_length = max(min(len(first), (room + 1) // 2), room - len(second))
        return _shortened(first, first_length, stream), _shortened(second, room - first_length, stream)

    def _framed(self, first: TokenArray, second: TokenArray) -> dict[str, NDArray[np.int64]]:
        """[CLS] A [SEP] B [SEP] and padding."""
        vocabulary, length = self._vocabulary, self.sequence_length
        second_from, end = len(first) + 2, len(first) + len(second) + NUM_FRAME_TOKENS
        input_ids = np.full(length, vocabulary.pad, dtype=np.int64)
        input_ids[0] = vocabulary.classify
        input_ids[1 : second_from - 1] = first
        input_ids[second_from - 1] = vocabulary.separate
        input_ids[second_from : end - 1] = second
        input_ids[end - 1] = vocabulary.separate
        token_type_ids = np.zeros(length, dtype=np.int64)
        token_type_ids[second_from:end] = 1
        attention_mask = np.zeros(length, dtype=np.int64)
        attention_mask[:end] = 1
        return {"input_ids": input_ids, "token_type_ids": token_type_ids, "attention_mask": attention_mask}


def check_sample_options(*, sequence_length: int, seed: int, mlm_probability: float) -> None:
    """Refuse values outside their range.

    Raises:
        ConfigError: naming the option, its value and its range.
    """
    shortest = NUM_FRAME_TOKENS + 2
    if sequence_length < shortest:
        raise ConfigError(
            f"data.sequence_length is {sequence_length}; [CLS] A [SEP] B [SEP] needs at least {shortest}, "
            "128 and 512 are usual"
        )
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"data.seed is {seed}; it must be 0 or more and below 2**63")
    if not 0 < mlm_probability < 1:
        raise ConfigError(f"data.mlm_probability is {mlm_probability}; it must be between 0 and 1, 0.15 is usual")


def _first_sentences(documents: TokenizedDocuments, *, at_least: int) -> NDArray[np.int64]:
    """Every sentence that has a next one in its document; of at least so many documents with text."""
    num_sentences = np.diff(documents.document_starts)
    if (num_sentences > 0).sum() < at_least:
        raise DataError(
            f"{int((num_sentences > 0).sum())} document(s) with text: a random next sentence comes from another "
            "document, so at least two are needed; divide the corpus into documents by blank lines"
        )
    has_next = np.ones(documents.num_sentences, dtype=bool)
    has_next[documents.document_starts[1:][num_sentences > 0] - 1] = False
    starts = np.flatnonzero(has_next)
    if not len(starts):
        raise DataError(
            f"none of {documents.num_documents} documents has two sentences, so no sentence has a next one; "
            "a blank line belongs after each document, not after each sentence"
        )
    return starts


def _one_begins_with_other(segment: TokenArray, following: TokenArray) -> bool:
    common = min(len(segment), len(following))
    return bool(np.array_equal(segment[:common], following[:common]))


def _shortened(segment: TokenArray, length: int, stream: np.random.Philox) -> TokenArray:
    """Drop tokens at a random end, one by one: the number dropped in front is a sum of fair coins."""
    excess = len(segment) - length
    if not excess:
        return segment
    coins = np.unpackbits(stream.random_raw(-(-excess // 64)).astype("<u8").view(np.uint8), count=excess)
    front = int(coins.sum())
    return segment[front : front + length]
