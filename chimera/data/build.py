"""From a ``DataConfig`` to samples.

Knows the order of the steps: read, divide into training and held-out documents, train or read the vocabulary, tokenise,
and keep the result; later calls with the same inputs load it. Every rank calls this by itself and gets the same.
Refuses to know about steps, micro-batches and models.
"""

import hashlib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from chimera.data.bert_samples import BertSamples
from chimera.data.cache import TokenizedCorpus, cached_corpus
from chimera.data.config import BUNDLED, DEFAULT_VOCAB_SIZE, DataConfig
from chimera.data.corpus import bundled_corpus_path, decompress, parse_segmented_text, read_bytes, split_documents
from chimera.data.index_cache import default_cache_dir
from chimera.data.tokenizer import WordPiece, train_wordpiece
from chimera.data.tokens import TokenizedDocuments, tokenize_documents
from chimera.data.unigram import unigram_cross_entropy, unigram_entropy
from chimera.errors import DataError

__all__ = ["PretrainingData", "build_data"]

# Part of the cache's key: another way of reading or tokenising must not meet old files.
_CACHE_VERSION = 2


@dataclass(frozen=True, slots=True, eq=False)
class PretrainingData:
    """What a BERT is trained on and measured by.

    Attributes:
        train: samples of the training documents.
        heldout: samples of the held-out documents.
        tokenizer: text to ids and back.
        unigram_entropy: of the training documents' word pieces, in nats per token; what "unigram entropy" means
            wherever a loss is compared with it.
        heldout_unigram_cross_entropy: the held-out loss, in nats per token, of knowing the training frequencies only.
        num_train_documents: documents to train on.
        num_heldout_documents: documents to evaluate on.
        num_train_tokens: word pieces of the training documents.
        num_heldout_tokens: word pieces of the held-out documents.
        num_empty_sentences: sentences without a single token, which are in no sample.
    """

    train: BertSamples
    heldout: BertSamples
    tokenizer: WordPiece
    unigram_entropy: float
    heldout_unigram_cross_entropy: float
    num_train_documents: int
    num_heldout_documents: int
    num_train_tokens: int
    num_heldout_tokens: int
    num_empty_sentences: int

    @property
    def num_documents(self) -> int:
        """Documents of the corpus."""
        return self.num_train_documents + self.num_heldout_documents

    @property
    def vocab_size(self) -> int:
        """Rows that a word embedding needs."""
        return self.tokenizer.vocabulary.size


def build_data(config: DataConfig) -> PretrainingData:
    """Make the samples that a configuration describes.

    Raises:
        ConfigError: options that contradict each other.
        DataError: a corpus, vocabulary or cache that cannot be used, and what to do about it.
    """
    corpus = _tokenized_corpus(config)
    train_ids, heldout_ids = _split(corpus.documents.num_documents, config)
    train, heldout = corpus.documents.select(train_ids), corpus.documents.select(heldout_ids)
    vocabulary = corpus.tokenizer.vocabulary
    return PretrainingData(
        train=_samples(train, corpus.tokenizer, config, side="training"),
        heldout=_samples(heldout, corpus.tokenizer, config, side="held-out"),
        tokenizer=corpus.tokenizer,
        unigram_entropy=unigram_entropy(train, vocabulary),
        heldout_unigram_cross_entropy=unigram_cross_entropy(train, heldout, vocabulary),
        num_train_documents=train.num_documents,
        num_heldout_documents=heldout.num_documents,
        num_train_tokens=train.num_tokens,
        num_heldout_tokens=heldout.num_tokens,
        num_empty_sentences=corpus.num_empty_sentences,
    )


def _tokenized_corpus(config: DataConfig) -> TokenizedCorpus:
    """The whole corpus as tokens, from the cache where it has been made before."""
    path = bundled_corpus_path() if config.corpus == BUNDLED else Path(config.corpus).expanduser()
    data = read_bytes(path)
    given = None if config.vocabulary is None else _given_tokenizer(config.vocabulary, config)

    def make() -> TokenizedCorpus:
        documents = parse_segmented_text(decompress(data, name=str(path)), name=str(path))
        tokenizer = _trained_tokenizer(documents, config) if given is None else given
        tokens, num_empty = tokenize_documents(documents, tokenizer)
        return TokenizedCorpus(tokens, tokenizer, num_empty)

    folder = default_cache_dir() if config.cache_dir is None else Path(config.cache_dir).expanduser()
    return cached_corpus(folder, _inputs(data, given, config), make)


def _inputs(data: bytes, given: WordPiece | None, config: DataConfig) -> dict[str, str | int | float | bool | None]:
    """Everything that the tokenised corpus is a function of."""
    inputs: dict[str, str | int | float | bool | None] = {
        "cache_version": _CACHE_VERSION,
        "tokenizers": tokenizers.__version__,
        "corpus": hashlib.sha256(data).hexdigest(),
    }
    if given is not None:
        return inputs | {"tokenizer": hashlib.sha256(given.to_json().encode()).hexdigest()}
    # A vocabulary is trained on the training documents, so it also depends on which those are.
    return inputs | {
        "vocab_size": config.vocab_size or DEFAULT_VOCAB_SIZE,
        "lowercase": config.lowercase is not False,
        "heldout_fraction": config.heldout_fraction,
        "seed": config.seed,
    }


def _given_tokenizer(path: str, config: DataConfig) -> WordPiece:
    """The vocabulary of a file, of the size that was asked for if one was."""
    tokenizer = WordPiece.from_file(Path(path).expanduser(), lowercase=config.lowercase)
    size = tokenizer.vocabulary.size
    if config.vocab_size not in (None, size):
        raise DataError(
            f"vocabulary {path} has {size} tokens, data.vocab_size is {config.vocab_size}; "
            f"set data.vocab_size to {size} or leave it out"
        )
    return tokenizer


def _trained_tokenizer(documents: list[list[str]], config: DataConfig) -> WordPiece:
    """A vocabulary that has not seen the held-out documents."""
    train_ids, _ = _split(len(documents), config)
    return train_wordpiece(
        list(chain.from_iterable(documents[index] for index in train_ids)),
        vocab_size=config.vocab_size or DEFAULT_VOCAB_SIZE,
        lowercase=config.lowercase is not False,
    )


def _split(num_documents: int, config: DataConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return split_documents(num_documents, heldout_fraction=config.heldout_fraction, seed=config.seed)


def _samples(documents: TokenizedDocuments, tokenizer: WordPiece, config: DataConfig, *, side: str) -> BertSamples:
    """Samples of one side, whose name stands before what is wrong with it."""
    try:
        return BertSamples(
            documents,
            sequence_length=config.sequence_length,
            seed=config.seed,
            vocabulary=tokenizer.vocabulary,
            mlm_probability=config.mlm_probability,
        )
    except DataError as error:
        raise DataError(
            f"{side} documents of {config.corpus}: {error}; "
            f"data.heldout_fraction {config.heldout_fraction} decides how many documents each side has"
        ) from error
