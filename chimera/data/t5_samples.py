"""T5's samples: stretches of joined documents are cut out, and are to be written in order.

Knows span corruption (Raffel et al. 2020, section 3.1.4, and ``random_spans_noise_mask`` of
google-research/text-to-text-transfer-transformer): the numbers of noise tokens and of spans follow from the length, the
lengths of spans are random. Each span becomes one sentinel, counted downward from the highest id. Refuses to know where
documents come from.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from chimera.data.index_cache import Inputs
from chimera.data.keyed import Purpose, keyed_stream
from chimera.data.masking import IGNORED_LABEL
from chimera.data.packing import PackedPieces
from chimera.data.samples import Sample
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokens import TokenizedDocuments
from chimera.errors import ConfigError, DataError

__all__ = ["NUM_SENTINELS", "SpanVocabulary", "T5Samples", "span_lengths"]

NUM_SENTINELS: Final = 100
"""What a vocabulary without any is given, as T5's own has."""

_END_TOKENS: Final = ("</s>", "<eos>", "<|endoftext|>", "[SEP]")
_PAD_TOKENS: Final = ("<pad>", "[PAD]")


@dataclass(frozen=True, slots=True)
class SpanVocabulary:
    """The ids that frame T5's samples.

    Attributes:
        size: rows that a word embedding needs, sentinels included.
        pad: of padding, and of the decoder's first input.
        end: at the end of input and target.
        sentinels: in the order of their use, downward: <extra_id_0> first.
    """

    size: int
    pad: int
    end: int
    sentinels: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Self:
        """Find them in a vocabulary; one without sentinels is given a hundred above its own ids.

        Raises:
            DataError: the vocabulary has no token for padding or for an end.
        """
        ids = tokenizer.tokens()
        end, pad = (_one_of(names, ids, tokenizer.name) for names in (_END_TOKENS, _PAD_TOKENS))
        named = [ids[name] for number in range(NUM_SENTINELS) if (name := f"<extra_id_{number}>") in ids]
        if named:
            return cls(tokenizer.size, pad, end, tuple(named))
        size = tokenizer.size + NUM_SENTINELS
        return cls(size, pad, end, tuple(range(size - 1, tokenizer.size - 1, -1)))


class T5Samples:
    """An endless sequence of samples; see ``PackedPieces`` for what an epoch is.

    Args:
        documents: the corpus.
        sequence_length: tokens of the encoder's input, the end included; a piece of text is as long as this allows, so
            that nothing is padded there.
        seed: 0 or more.
        vocabulary: the framing ids.
        noise_density: share of the tokens that are cut out.
        mean_span_length: tokens of a stretch, on average.
        identity, cache_dir: see ``PackedPieces``.

    Raises:
        ConfigError: an argument outside its range, or more spans than sentinels.
        DataError: the corpus is shorter than a sample.
    """

    fields: ClassVar = ("input_ids", "attention_mask", "decoder_input_ids", "labels")

    __slots__ = ("_num_noise", "_num_spans", "_pieces", "_seed", "_vocabulary", "sequence_length", "target_length")

    def __init__(
        self,
        documents: TokenizedDocuments,
        *,
        sequence_length: int,
        seed: int,
        vocabulary: SpanVocabulary,
        noise_density: float = 0.15,
        mean_span_length: float = 3.0,
        identity: Inputs | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        if not 0 < noise_density < 1:
            raise ConfigError(f"data.mlm_probability is {noise_density}; it must be between 0 and 1, 0.15 is usual")
        if not 1 <= mean_span_length < float("inf"):
            raise ConfigError(f"data.mean_span_length is {mean_span_length}; it must be 1 or more, 3 is usual")
        self.sequence_length = sequence_length
        self._seed = seed
        self._vocabulary = vocabulary
        length, self._num_noise, self._num_spans = span_lengths(sequence_length, noise_density, mean_span_length)
        self.target_length = self._num_noise + self._num_spans + 1
        if self._num_spans > len(vocabulary.sentinels):
            raise ConfigError(
                f"data.sequence_length {sequence_length} gives {self._num_spans} spans, the vocabulary has "
                f"{len(vocabulary.sentinels)} sentinels; set a shorter one, or a longer data.mean_span_length"
            )
        self._pieces = PackedPieces(
            documents, length=length, overlap=0, seed=seed, identity=identity, cache_dir=cache_dir
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
            int64 arrays: ``input_ids`` and ``attention_mask`` of shape (sequence_length,), 1 for tokens and 0 for
            padding; ``decoder_input_ids`` and ``labels`` of shape (target_length,), the first being the second moved on
            by one behind a padding token.
        """
        if index < 0:
            raise IndexError(f"sample {index}: samples are counted from 0 and have no end to count back from")
        tokens = self._pieces[index].astype(np.int64)
        bounds = self._span_bounds(len(tokens), keyed_stream(self._seed, index, Purpose.SAMPLE))
        inputs: list[NDArray[np.int64]] = []
        targets: list[NDArray[np.int64]] = []
        end = 0
        for sentinel, (first, last) in zip(self._vocabulary.sentinels, bounds, strict=False):
            mark = np.array([sentinel])
            inputs += [tokens[end:first], mark]
            targets += [mark, tokens[first:last]]
            end = last
        inputs.append(tokens[end:])
        input_ids, used = _filled(inputs, self._vocabulary.end, self.sequence_length, self._vocabulary.pad)
        labels, written = _filled(targets, self._vocabulary.end, self.target_length, IGNORED_LABEL)
        decoder = np.full(self.target_length, self._vocabulary.pad)
        decoder[1:written] = labels[: written - 1]
        attention = np.zeros(self.sequence_length, dtype=np.int64)
        attention[:used] = 1
        return {
            "input_ids": input_ids,
            "attention_mask": attention,
            "decoder_input_ids": decoder,
            "labels": labels,
        }

    def _span_bounds(self, length: int, stream: np.random.Philox) -> list[tuple[int, int]]:
        """Where each span begins and ends: kept and cut stretches in turn, a kept one first."""
        cut = _random_parts(self._num_noise, self._num_spans, stream)
        kept = _random_parts(length - self._num_noise, self._num_spans, stream)
        ends = np.cumsum(kept + cut)
        return list(zip((ends - cut).tolist(), ends.tolist(), strict=True))


def span_lengths(sequence_length: int, noise_density: float, mean_span_length: float) -> tuple[int, int, int]:
    """Return (tokens of text, tokens cut out, spans) for an input that fills ``sequence_length``, its end included.

    >>> span_lengths(512, 0.15, 3.0)
    (568, 85, 28)

    Raises:
        ConfigError: not even a short text fits.
    """

    def of(length: int) -> tuple[int, int]:
        noise = min(max(round(length * noise_density), 1), length - 1)
        spans = min(max(round(noise / mean_span_length), 1), noise, length - noise)
        return noise, spans

    found = None
    length = 2
    while True:
        noise, spans = of(length)
        if length - noise + spans + 1 > sequence_length:
            break
        found = (length, noise, spans)
        length += 1
    if found is None:
        raise ConfigError(f"data.sequence_length is {sequence_length}; T5's samples need at least 3, 512 is usual")
    return found


def _random_parts(total: int, parts: int, stream: np.random.Philox) -> NDArray[np.int64]:
    """Cut ``total`` into that many parts of at least 1, every way being equally likely."""
    cuts = np.argsort(stream.random_raw(total - 1), kind="stable")[: parts - 1] + 1 if total > 1 else np.empty(0, int)
    return np.diff(np.concatenate(([0], np.sort(cuts), [total]))).astype(np.int64)


def _filled(parts: list[NDArray[np.int64]], end: int, length: int, filler: int) -> tuple[NDArray[np.int64], int]:
    """Join the parts and the end, fill up to ``length``, and return how many tokens there are."""
    joined = np.concatenate([*parts, [end]])
    assert len(joined) <= length, "the lengths were made for this"
    return np.concatenate([joined, np.full(length - len(joined), filler)]), len(joined)


def _one_of(names: tuple[str, ...], ids: dict[str, int], vocabulary: str) -> int:
    for name in names:
        if name in ids:
            return ids[name]
    raise DataError(f"vocabulary {vocabulary} has none of {', '.join(names)}, which T5's samples need; add one")
