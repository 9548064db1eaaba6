"""The ``[data]`` section of a configuration.

Knows the options of the data path, their defaults and their ranges. Refuses to know the files: whether a corpus or a
vocabulary can be used is found when it is read.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from chimera.data.bert_samples import Pairs, check_sample_options
from chimera.errors import ConfigError, nearest_names

__all__ = ["BUNDLED", "DEFAULT_VOCAB_SIZE", "DataConfig", "SampleKind"]

BUNDLED = "bundled"
DEFAULT_VOCAB_SIZE = 4096

SampleKind = Literal["bert", "gpt", "t5", "ict"]

# Options that only some kinds of samples have, with the values that leave them alone.
_ONLY_FOR: Final[dict[str, tuple[SampleKind, ...]]] = {
    "pairs": ("bert",),
    "whole_words": ("bert",),
    "longest_ngram": ("bert",),
    "mean_span_length": ("t5",),
    "query_length": ("ict",),
    "query_kept": ("ict",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What to train on.

    Attributes:
        samples: what a sample is: BERT's pairs of segments, GPT's pieces, T5's spans, or ICT's sentence and block.
        corpus: path of segmented text, plain or compressed, or "bundled" for the English corpus of the package.
        datasets: indexed datasets in place of a corpus, by the common part of their two files' names.
        weights: how often samples of each dataset come, as ratios; in proportion to their lengths when not given.
        heldout_datasets: indexed datasets to evaluate on; a share of the documents when not given.
        test_datasets: likewise, for a last measurement.
        vocabulary: path of a tokenizer's file; a WordPiece vocabulary is trained on the training documents when not
            given, and a dataset's own tokenizer.json is taken.
        vocab_size: tokens of the vocabulary to train, 4096 when not given; beside ``vocabulary``, the size that file
            has to have.
        lowercase: whether to lower-case text and strip accents; true when not given. Not with a tokenizer.json.
        sequence_length: tokens of a sample.
        heldout_fraction: share of the documents that are kept for evaluation.
        test_fraction: share of a dataset's documents that are kept for a last measurement.
        seed: of the division into training and held-out documents, and of the samples.
        mlm_probability: share of the word pieces to predict; of the tokens that T5's samples cut out.
        pairs: what BERT's second label asks: is B the "next" segment, or are A and B in "order".
        whole_words: whether BERT's samples hide whole words.
        longest_ngram: words of the longest stretch that BERT's samples hide as one.
        mean_span_length: tokens of a stretch that T5's samples cut out, on average.
        query_length: tokens of ICT's sentence.
        query_kept: share of ICT's blocks that keep their sentence.
        workers: processes of each rank that make samples ahead; 0 makes them when they are needed.
        cache_dir: folder for tokenised corpora and indices; the user's cache folder when not given.

    Raises:
        ConfigError: a value outside its range, naming the option.
    """

    samples: SampleKind = "bert"
    corpus: str = BUNDLED
    datasets: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    heldout_datasets: tuple[str, ...] = ()
    test_datasets: tuple[str, ...] = ()
    vocabulary: str | None = None
    vocab_size: int | None = None
    lowercase: bool | None = None
    sequence_length: int = 128
    heldout_fraction: float = 0.05
    test_fraction: float = 0.0
    seed: int = 0
    mlm_probability: float = 0.15
    pairs: Pairs = "next"
    whole_words: bool = False
    longest_ngram: int = 1
    mean_span_length: float = 3.0
    query_length: int = 64
    query_kept: float = 0.1
    workers: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("corpus", "vocabulary", "cache_dir"):
            if getattr(self, name) == "":
                raise ConfigError(f"data.{name} is empty; give a path, or leave the option out")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"data.vocab_size is {self.vocab_size}; 4096 suits a small corpus, 30522 is BERT's")
        if not 0 < self.heldout_fraction < 1:
            raise ConfigError(f"data.heldout_fraction is {self.heldout_fraction}; it must be between 0 and 1, say 0.05")
        if not 0 <= self.test_fraction < 1 - self.heldout_fraction:
            raise ConfigError(
                f"data.test_fraction is {self.test_fraction}; it must be 0 or more and leave something beside "
                f"data.heldout_fraction, {self.heldout_fraction}"
            )
        if self.workers < 0:
            raise ConfigError(f"data.workers is {self.workers}; 0 makes samples when they are needed, 1 or 2 ahead")
        _require_one_of("samples", self.samples, get_args(SampleKind))
        _require_one_of("pairs", self.pairs, get_args(Pairs))
        check_sample_options(sequence_length=self.sequence_length, seed=self.seed, mlm_probability=self.mlm_probability)
        self._check_sources()
        self._check_kind()

    def _check_sources(self) -> None:
        if self.datasets and self.corpus != BUNDLED:
            raise ConfigError("data.corpus and data.datasets are both given; leave one of them out")
        if self.weights and len(self.weights) != len(self.datasets):
            raise ConfigError(f"data.weights has {len(self.weights)} numbers for {len(self.datasets)} data.datasets")
        for name in ("heldout_datasets", "test_datasets"):
            if getattr(self, name) and not self.datasets:
                raise ConfigError(f"data.{name} is given without data.datasets; a corpus is divided by its documents")
        if self.test_fraction and (self.test_datasets or not self.datasets):
            raise ConfigError(
                "data.test_fraction divides data.datasets; leave it out with data.test_datasets or a corpus"
            )

    def _check_kind(self) -> None:
        for name, kinds in _ONLY_FOR.items():
            if self.samples not in kinds and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"data.{name} is for {' and '.join(kinds)} samples; data.samples is {self.samples}")


def _require_one_of(option: str, value: str, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"data.{option} is {value!r}{nearest_names(value, choices)}; choose one of {', '.join(choices)}"
        )
