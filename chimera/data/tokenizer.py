"""WordPiece, by the ``tokenizers`` library: from a vocabulary file, from a tokenizer.json, or trained on a corpus.

Knows the five special tokens that BERT samples need, checks that a vocabulary has them, and makes training repeatable.
Refuses to know about documents or samples: it turns sentences into token ids and back.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from chimera.data.text_tokenizer import TextTokenizer
from chimera.errors import ConfigError, DataError

__all__ = ["SPECIAL_TOKENS", "Vocabulary", "WordPiece", "in_batches", "train_wordpiece"]

#: In the order of their ids in a trained vocabulary: padding is 0.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CONTINUATION = "##"

# As BertWordPieceTokenizer: rarer characters become [UNK], and longer words too.
_MAX_ALPHABET = 1000
_MAX_CHARACTERS_PER_WORD = 100


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a sample needs to know of a vocabulary.

    Attributes:
        size: number of ids, the rows of the word embedding.
        pad: id of [PAD].
        unknown: id of [UNK].
        classify: id of [CLS].
        separate: id of [SEP].
        mask: id of [MASK].
        special: all ids that stand for no text, ascending: the five above, ids without a token, tokens that the
            tokenizer marks as special, and BERT's placeholders [unused0], [unused1], …
    """

    size: int
    pad: int
    unknown: int
    classify: int
    separate: int
    mask: int
    special: tuple[int, ...]


class WordPiece(TextTokenizer):
    """A tokenizer with the special tokens of BERT."""

    __slots__ = ("vocabulary",)

    vocabulary: Vocabulary

    def __init__(self, tokenizer: Tokenizer, *, name: str) -> None:
        """Take over a tokenizer of the library; ``name`` stands for its origin in messages.

        Raises:
            DataError: its vocabulary lacks one of ``SPECIAL_TOKENS``.
        """
        super().__init__(tokenizer, name=name)
        self.vocabulary = _vocabulary(tokenizer, name=name)

    @classmethod
    def from_file(cls, path: str | Path, *, lowercase: bool | None = None) -> Self:
        """Read a vocabulary: one token per line, the line is its id; or a tokenizer.json.

        Args:
            path: the file; a name that ends in ``.json`` means a tokenizer.json.
            lowercase: whether to lower-case text and strip its accents; true when not given. A tokenizer.json says so
                itself, and giving it there is an error.

        Raises:
            ConfigError: ``lowercase`` was given for a tokenizer.json.
            DataError: the file is missing, unreadable, or lacks a special token, or a token stands in it twice.
        """
        text = _read_text(Path(path))
        if Path(path).suffix != ".json":
            return cls(_tokenizer_of(_parse_vocabulary(text, name=str(path)), lowercase is not False), name=str(path))
        if lowercase is not None:
            raise ConfigError(
                f"data.lowercase is {lowercase}, but {path} is a tokenizer.json, which says itself how text is "
                "normalised; leave data.lowercase out, or give a vocabulary file of one token per line"
            )
        return cls.from_json(text, name=str(path))

    @property
    def special(self) -> tuple[int, ...]:
        """Ids that stand for no text, ascending."""
        return self.vocabulary.special

    def continuations(self) -> NDArray[np.bool_]:
        """Return, for each id, whether it goes on with the word of the token before it."""
        continues = np.zeros(self.size, dtype=bool)
        continues[[number for token, number in self.tokens().items() if token.startswith(_CONTINUATION)]] = True
        return continues


def train_wordpiece(sentences: Iterable[str], *, vocab_size: int, lowercase: bool = True) -> WordPiece:
    """Train a WordPiece vocabulary; equal arguments give an equal vocabulary, in any process.

    The library numbers the characters inside words ("##a") in the order of a hash table that differs from run to run,
    and breaks ties between equally frequent merges by those numbers. So the characters are found by a first training
    without merges, and a second one is told to number them in their own order.

    Args:
        sentences: the training text; gone through twice.
        vocab_size: number of tokens, the five special ones (ids 0 to 4) included.
        lowercase: whether to lower-case the text and strip its accents.

    Raises:
        DataError: the text has too many different characters or too few words for ``vocab_size``.
    """
    specials = list(SPECIAL_TOKENS)
    alphabet = _trained(sentences, specials, vocab_size=len(specials), lowercase=lowercase)
    inner = sorted(token for token in alphabet if re.fullmatch(f"{_CONTINUATION}.", token, re.DOTALL))
    if len(alphabet) > vocab_size:
        raise DataError(
            f"data.vocab_size is {vocab_size}, but the special tokens and the characters of the corpus alone take "
            f"{len(alphabet)}; set data.vocab_size above that"
        )
    vocabulary = _trained(sentences, [*specials, *inner], vocab_size=vocab_size, lowercase=lowercase)
    if len(vocabulary) < vocab_size:
        raise DataError(
            f"the corpus gives only {len(vocabulary)} different word pieces, data.vocab_size asks for {vocab_size}; "
            f"set data.vocab_size to {len(vocabulary)} or less, or use a larger corpus"
        )
    return WordPiece(_tokenizer_of(vocabulary, lowercase), name="trained vocabulary")


def _trained(sentences: Iterable[str], specials: list[str], *, vocab_size: int, lowercase: bool) -> dict[str, int]:
    """The vocabulary of one run of the library's trainer, which never gives fewer tokens than there are characters."""
    tokenizer = _tokenizer_of({}, lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        limit_alphabet=_MAX_ALPHABET,
        continuing_subword_prefix=_CONTINUATION,
        show_progress=False,
    )
    tokenizer.train_from_iterator(in_batches(sentences), trainer)
    return dict(tokenizer.get_vocab())


def in_batches(sentences: Iterable[str], size: int = 1000) -> Iterator[list[str]]:
    """Yield lists of sentences: the library crosses from Python once a list."""
    batch: list[str] = []
    for sentence in sentences:
        batch.append(sentence)
        if len(batch) == size:
            yield batch
            batch = []
    yield batch


def _tokenizer_of(vocabulary: dict[str, int], lowercase: bool) -> Tokenizer:  # noqa: FBT001
    """BERT's normalisation and word splitting around a WordPiece vocabulary."""
    model = models.WordPiece(
        vocab=vocabulary,
        unk_token="[UNK]",  # noqa: S106
        max_input_chars_per_word=_MAX_CHARACTERS_PER_WORD,
        continuing_subword_prefix=_CONTINUATION,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUATION)
    return tokenizer


def _vocabulary(tokenizer: Tokenizer, *, name: str) -> Vocabulary:
    """Find the special ids, or name the ones that are missing."""
    ids: dict[str, int] = tokenizer.get_vocab()
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise DataError(
            f"vocabulary {name} lacks {', '.join(missing)} of the special tokens {', '.join(SPECIAL_TOKENS)}; "
            "add them, or leave data.vocabulary out to train a vocabulary on the corpus"
        )
    size = max(ids.values()) + 1
    marked = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    placeholders = {number for token, number in ids.items() if re.fullmatch(r"\[unused\d+\]", token)}
    holes = set(range(size)) - set(ids.values())
    pad, unknown, classify, separate, mask = (ids[token] for token in SPECIAL_TOKENS)
    special = sorted({pad, unknown, classify, separate, mask} | marked | placeholders | holes)
    return Vocabulary(size, pad, unknown, classify, separate, mask, tuple(special))


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise DataError(f"vocabulary {path} is a folder; set data.vocabulary to the vocab.txt or tokenizer.json in it")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(
            f"vocabulary {path} does not exist; set data.vocabulary to a vocab.txt or tokenizer.json, "
            "or leave it out to train a vocabulary on the corpus"
        ) from None
    except OSError as error:
        raise DataError(f"vocabulary {path} cannot be read: {error.strerror}; check its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(f"vocabulary {path} is not UTF-8 text: {error.reason} at byte {error.start + 1}") from None


def _parse_vocabulary(text: str, *, name: str) -> dict[str, int]:
    """Tokens by line; a line number is an id, so an empty or repeated line would shift or hide one."""
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n")):
        token = line.strip()
        if not token or token in vocabulary:
            problem = f"repeats {token!r} of line {vocabulary[token] + 1}" if token else "is empty"
            raise DataError(f"vocabulary {name}: line {number + 1} {problem}; one line holds one token, each once")
        vocabulary[token] = number
    return vocabulary
