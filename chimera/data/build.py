"""From a ``DataConfig`` to samples.

Knows the order of the steps: find the documents of each part, of a text corpus or of indexed datasets, and make the
samples of the kind that is asked for. What takes time is kept, so later calls with the same inputs load it. Every rank
calls this by itself and gets the same. Refuses to know about steps, micro-batches and models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chimera.data.bert_samples import BertSamples
from chimera.data.config import DataConfig
from chimera.data.gpt_samples import GptSamples
from chimera.data.ict_samples import IctSamples
from chimera.data.index_cache import Arrays, Inputs, default_cache_dir, kept_arrays
from chimera.data.masking import Words
from chimera.data.samples import BlendedSamples, Samples
from chimera.data.sources import Part, corpus_parts, dataset_parts
from chimera.data.t5_samples import SpanVocabulary, T5Samples
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokenizer import WordPiece
from chimera.data.unigram import token_counts, unigram_cross_entropy, unigram_entropy
from chimera.errors import ConfigError, DataError

__all__ = ["PretrainingData", "build_data"]


@dataclass(frozen=True, slots=True, eq=False)
class PretrainingData:
    """What a model is trained on and measured by.

    Attributes:
        train: samples of the training documents.
        heldout: samples of the held-out documents.
        test: samples for a last measurement; None where there are none.
        tokenizer: text to ids and back.
        vocab_size: rows that a word embedding needs.
        unigram_entropy: of the training documents' word pieces, in nats per token; what "unigram entropy" means
            wherever a loss is compared with it.
        heldout_unigram_cross_entropy: the held-out loss, in nats per token, of knowing the training frequencies only.
        num_train_documents: documents to train on.
        num_heldout_documents: documents to evaluate on.
        num_train_tokens: word pieces of the training documents.
        num_heldout_tokens: word pieces of the held-out documents.
        num_empty_sentences: sentences without a single token, which are in no sample.
    """

    train: Samples
    heldout: Samples
    test: Samples | None
    tokenizer: TextTokenizer
    vocab_size: int
    unigram_entropy: float
    heldout_unigram_cross_entropy: float
    num_train_documents: int
    num_heldout_documents: int
    num_train_tokens: int
    num_heldout_tokens: int
    num_empty_sentences: int

    @property
    def num_documents(self) -> int:
        """Documents to train and to evaluate on."""
        return self.num_train_documents + self.num_heldout_documents


def build_data(config: DataConfig) -> PretrainingData:
    """Make the samples that a configuration describes.

    Raises:
        ConfigError: options that contradict each other.
        DataError: a corpus, dataset, vocabulary or cache that cannot be used, and what to do about it.
    """
    folder = default_cache_dir() if config.cache_dir is None else Path(config.cache_dir).expanduser()
    found = dataset_parts(config, folder) if config.datasets else corpus_parts(config, folder)
    maker = _Maker(config, found.tokenizer, folder)
    # First, since it finds ids that the vocabulary does not have.
    train_counts, heldout_counts = (
        np.sum([maker.counts(part) for part in parts], axis=0) for parts in (found.train, found.heldout)
    )
    train, heldout, test = (
        _samples_of(parts, maker, config.weights if side == "training" else (), side=side)
        for side, parts in (("training", found.train), ("held-out", found.heldout), ("test", found.test))
    )
    assert train is not None, "a configuration has something to train on"
    assert heldout is not None, "and something to evaluate on"
    return PretrainingData(
        train=train,
        heldout=heldout,
        test=test,
        tokenizer=found.tokenizer,
        vocab_size=maker.vocab_size,
        unigram_entropy=unigram_entropy(train_counts),
        heldout_unigram_cross_entropy=unigram_cross_entropy(train_counts, heldout_counts, found.tokenizer),
        num_train_documents=sum(part.documents.num_documents for part in found.train),
        num_heldout_documents=sum(part.documents.num_documents for part in found.heldout),
        num_train_tokens=sum(part.documents.num_tokens for part in found.train),
        num_heldout_tokens=sum(part.documents.num_tokens for part in found.heldout),
        num_empty_sentences=found.num_empty_sentences,
    )


def _samples_of(parts: Sequence[Part], maker: "_Maker", weights: Sequence[float], *, side: str) -> Samples | None:
    """Samples of one side, whose name stands before what is wrong with it; several datasets are blended."""
    sets: list[Samples] = []
    for number, part in enumerate(parts):
        try:
            sets.append(maker.samples(part, number))
        except DataError as error:
            raise DataError(f"{side} documents of {part.name}: {error}; {part.advice}") from error
    if not sets:
        return None
    if len(sets) == 1:
        return sets[0]
    return BlendedSamples(sets, weights or _in_proportion(sets))


def _in_proportion(sets: Sequence[Samples]) -> list[float]:
    """Weights to one part in a thousand; a small set still comes."""
    total = sum(map(len, sets))
    return [float(max(1, round(1000 * len(samples) / total))) for samples in sets]


class _Maker:
    """Makes samples of the kind that is asked for."""

    def __init__(self, config: DataConfig, tokenizer: TextTokenizer, cache_dir: Path) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._cache_dir = cache_dir
        self._spans = SpanVocabulary.of(tokenizer) if config.samples == "t5" else None
        self.vocab_size = self._spans.size if self._spans else tokenizer.size

    def counts(self, part: Part) -> NDArray[np.int64]:
        """Return how often each token occurs; counting a large part takes a while, so it is done once."""
        digest = sha256(self._tokenizer.to_json().encode()).hexdigest()
        options: Inputs = {"counts_version": 1, "tokenizer": digest}

        def make() -> Arrays:
            return {"counts": token_counts(part.documents, self._tokenizer)}

        return kept_arrays(self._cache_dir, "counts", part.identity, options, make)["counts"]

    def samples(self, part: Part, number: int) -> Samples:
        """Return the samples of a part; datasets of a blend have seeds of their own."""
        config = self._config
        seed = (config.seed + number) % (1 << 63)
        if config.samples == "gpt":
            return GptSamples(
                part.documents,
                sequence_length=config.sequence_length,
                seed=seed,
                identity=part.identity,
                cache_dir=self._cache_dir,
            )
        if self._spans is not None:
            return T5Samples(
                part.documents,
                sequence_length=config.sequence_length,
                seed=seed,
                vocabulary=self._spans,
                noise_density=config.mlm_probability,
                mean_span_length=config.mean_span_length,
                identity=part.identity,
                cache_dir=self._cache_dir,
            )
        tokenizer = self._word_piece()
        if config.samples == "ict":
            return IctSamples(
                part.documents,
                sequence_length=config.sequence_length,
                query_length=config.query_length,
                seed=seed,
                vocabulary=tokenizer.vocabulary,
                kept_share=config.query_kept,
                identity=part.identity,
                cache_dir=self._cache_dir,
            )
        by_words = config.whole_words or config.longest_ngram != 1
        return BertSamples(
            part.documents,
            sequence_length=config.sequence_length,
            seed=seed,
            vocabulary=tokenizer.vocabulary,
            mlm_probability=config.mlm_probability,
            pairs=config.pairs,
            words=Words(tokenizer.continuations() if config.whole_words else None, config.longest_ngram)
            if by_words
            else None,
            identity=part.identity,
            cache_dir=self._cache_dir,
        )

    def _word_piece(self) -> WordPiece:
        if not isinstance(self._tokenizer, WordPiece):
            raise ConfigError(
                f"data.samples is {self._config.samples!r}, whose samples are framed by BERT's special tokens; "
                f"vocabulary {self._tokenizer.name} lacks them: set data.vocabulary to one that has them"
            )
        return self._tokenizer
