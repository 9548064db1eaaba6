"""The documents to train, evaluate and test on: of a text corpus, or of indexed datasets.

Knows how each is found, divided and kept, and with which tokenizer. Refuses to know what samples are made of them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from chimera.data.cache import TokenizedCorpus, cached_corpus
from chimera.data.config import BUNDLED, DEFAULT_VOCAB_SIZE, DataConfig
from chimera.data.corpus import bundled_corpus_path, decompress, parse_segmented_text, read_bytes, split_documents
from chimera.data.index_cache import Inputs
from chimera.data.indexed import IndexedDataset
from chimera.data.indexed_documents import IndexedPart, open_parts
from chimera.data.prepare import tokenizer_path
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokenizer import SPECIAL_TOKENS, WordPiece, train_wordpiece
from chimera.data.tokenizer_files import read_tokenizer
from chimera.data.tokens import TokenizedDocuments, tokenize_documents
from chimera.errors import ConfigError, DataError

__all__ = ["Found", "Part", "corpus_parts", "dataset_parts"]

# Part of the cache's key: another way of reading or tokenising must not meet old files.
_CACHE_VERSION = 3


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Documents of one side of one source.

    Attributes:
        documents: them.
        name: of the source, for messages.
        advice: what decides how many there are.
        identity: what they are a function of; None where nothing made of them is kept.
    """

    documents: TokenizedDocuments
    name: str
    advice: str
    identity: Inputs | None


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a configuration names, side by side."""

    train: tuple[Part, ...]
    heldout: tuple[Part, ...]
    test: tuple[Part, ...]
    tokenizer: TextTokenizer
    num_empty_sentences: int


def dataset_parts(config: DataConfig, cache_dir: Path) -> Found:
    """Open indexed datasets and divide them, by ratio or by files.

    Raises:
        ConfigError: a vocabulary option that does not fit.
        DataError, FormatError, UsageError: a dataset or vocabulary that cannot be used.
    """
    opened = {
        prefix: IndexedDataset(prefix) for prefix in (*config.datasets, *config.heldout_datasets, *config.test_datasets)
    }
    tokenizer = _datasets_tokenizer(config, list(opened.values()))
    heldout_share = 0.0 if config.heldout_datasets else config.heldout_fraction
    shares = (1 - heldout_share - config.test_fraction, heldout_share, config.test_fraction)

    def parts(prefix: str, divided: Sequence[float]) -> tuple[Part, ...]:
        found = open_parts(opened[prefix], divided, seed=config.seed, cache_dir=cache_dir)
        return tuple(_part(part, prefix, config) for part in found)

    mixed = [parts(prefix, shares) for prefix in config.datasets]
    whole_heldout = [parts(prefix, (1.0,))[0] for prefix in config.heldout_datasets]
    whole_test = [parts(prefix, (1.0,))[0] for prefix in config.test_datasets]
    return Found(
        train=tuple(train for train, _, _ in mixed),
        heldout=tuple(whole_heldout or [heldout for _, heldout, _ in mixed]),
        test=tuple(whole_test or ([test for _, _, test in mixed] if config.test_fraction else [])),
        tokenizer=tokenizer,
        num_empty_sentences=0,
    )


def corpus_parts(config: DataConfig, cache_dir: Path) -> Found:
    """Tokenise a corpus, or load what came of it before, and divide it.

    Raises:
        ConfigError: options that contradict each other.
        DataError: a corpus, vocabulary or cache that cannot be used.
    """
    corpus = _tokenized_corpus(config, cache_dir)
    sides = _split(corpus.documents.num_documents, config)
    advice = f"data.heldout_fraction {config.heldout_fraction} decides how many documents each side has"
    train, heldout = (Part(corpus.documents.select(chosen), config.corpus, advice, None) for chosen in sides)
    return Found((train,), (heldout,), (), _with_frame(corpus.tokenizer), corpus.num_empty_sentences)


def _part(part: IndexedPart, prefix: str, config: DataConfig) -> Part:
    advice = (
        f"data.heldout_fraction {config.heldout_fraction} and data.test_fraction {config.test_fraction} decide how "
        "many documents each side has"
    )
    return Part(part.documents, prefix, advice, part.identity)


def _datasets_tokenizer(config: DataConfig, datasets: Sequence[IndexedDataset]) -> TextTokenizer:
    """The tokenizer that is given, or the one beside the datasets; all ids have to be its own."""
    if config.vocabulary is not None:
        return _given_tokenizer(config.vocabulary, config)
    files = [tokenizer_path(dataset.prefix) for dataset in datasets]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise DataError(f"{missing[0]} does not exist; set data.vocabulary to the file of the dataset's tokenizer")
    if len({path.read_bytes() for path in files}) > 1:
        raise DataError(
            f"{', '.join(map(str, files))} differ, so ids mean different things; build the datasets with one tokenizer"
        )
    return _given_tokenizer(str(files[0]), config)


def _tokenized_corpus(config: DataConfig, cache_dir: Path) -> TokenizedCorpus:
    """The whole corpus as tokens, from the cache where it has been made before."""
    path = bundled_corpus_path() if config.corpus == BUNDLED else Path(config.corpus).expanduser()
    data = read_bytes(path)
    given = None if config.vocabulary is None else _given_tokenizer(config.vocabulary, config)

    def make() -> TokenizedCorpus:
        documents = parse_segmented_text(decompress(data, name=str(path)), name=str(path))
        tokenizer = _trained_tokenizer(documents, config) if given is None else given
        end = _end_token(tokenizer) if _ends_documents(config) else None
        tokens, num_empty = tokenize_documents(documents, tokenizer, end)
        return TokenizedCorpus(tokens, tokenizer, num_empty)

    return cached_corpus(cache_dir, _inputs(data, given, config), make)


def _ends_documents(config: DataConfig) -> bool:
    """Whether samples join documents, which then have to be told apart."""
    return config.samples in {"gpt", "t5"}


def _end_token(tokenizer: TextTokenizer) -> int:
    ids = tokenizer.tokens()
    names = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")
    for name in names:
        if name in ids:
            return ids[name]
    raise DataError(
        f"vocabulary {tokenizer.name} has none of {', '.join(names)} to end a document with; build an indexed dataset "
        "with 'chimera data build --end-token' and name it in data.datasets"
    )


def _inputs(data: bytes, given: TextTokenizer | None, config: DataConfig) -> Inputs:
    """Everything that the tokenised corpus is a function of."""
    inputs: dict[str, str | int | float | bool | None] = {
        "cache_version": _CACHE_VERSION,
        "tokenizers": tokenizers.__version__,
        "corpus": hashlib.sha256(data).hexdigest(),
        "ends_documents": _ends_documents(config),
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


def _given_tokenizer(path: str, config: DataConfig) -> TextTokenizer:
    """The vocabulary of a file, of the size that was asked for if one was."""
    try:
        tokenizer = _with_frame(read_tokenizer(path, lowercase=config.lowercase))
    except ConfigError as error:
        raise ConfigError(f"data.vocabulary and data.lowercase: {error}") from None
    if config.vocab_size not in (None, tokenizer.size):
        raise DataError(
            f"vocabulary {path} has {tokenizer.size} tokens, data.vocab_size is {config.vocab_size}; "
            f"set data.vocab_size to {tokenizer.size} or leave it out"
        )
    return tokenizer


def _with_frame(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return a tokenizer with BERT's special tokens as what it is, any other as it stands."""
    if isinstance(tokenizer, WordPiece) or not set(SPECIAL_TOKENS) <= set(tokenizer.tokens()):
        return tokenizer
    return WordPiece.from_json(tokenizer.to_json(), name=tokenizer.name)


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
