"""The ``[data]`` section of a configuration.

Knows the options of the data path, their defaults and their ranges. Refuses to know the files: whether a corpus or a
vocabulary can be used is found when it is read.
"""

from dataclasses import dataclass

from chimera.data.bert_samples import check_sample_options
from chimera.errors import ConfigError

__all__ = ["BUNDLED", "DEFAULT_VOCAB_SIZE", "DataConfig"]

BUNDLED = "bundled"
DEFAULT_VOCAB_SIZE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What to train on.

    Attributes:
        corpus: path of segmented text, plain or compressed, or "bundled" for the English corpus of the package.
        vocabulary: path of a vocab.txt or a tokenizer.json; a vocabulary is trained on the training documents when
            not given.
        vocab_size: tokens of the vocabulary to train, 4096 when not given; beside ``vocabulary``, the size that file
            has to have.
        lowercase: whether to lower-case text and strip accents; true when not given. Not with a tokenizer.json.
        sequence_length: tokens of a sample.
        heldout_fraction: share of the documents that are kept for evaluation.
        seed: of the division into training and held-out documents, and of the samples.
        mlm_probability: share of the word pieces to predict.
        cache_dir: folder for tokenised corpora; the user's cache folder when not given.

    Raises:
        ConfigError: a value outside its range, naming the option.
    """

    corpus: str = BUNDLED
    vocabulary: str | None = None
    vocab_size: int | None = None
    lowercase: bool | None = None
    sequence_length: int = 128
    heldout_fraction: float = 0.05
    seed: int = 0
    mlm_probability: float = 0.15
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
        check_sample_options(sequence_length=self.sequence_length, seed=self.seed, mlm_probability=self.mlm_probability)
