"""Training a tokenizer on text: WordPiece as BERT's, byte-level BPE as GPT-2's, Unigram as T5's.

Knows which special tokens each kind has and with which normalisation it comes. Text is read again for every pass and
never held as a whole.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from chimera.data.text.blocks import read_blocks
from chimera.data.text.documents import documents_of
from chimera.data.text.options import TextOptions
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokenizer import in_batches, train_wordpiece
from chimera.data.tokenizer_files import byte_level_tokenizer
from chimera.errors import DataError

__all__ = ["TextFiles", "TokenizerKind", "train_tokenizer"]

TokenizerKind = Literal["wordpiece", "bpe", "unigram"]

_NUM_SENTINELS: Final = 100


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The sequences of text files, which can be gone through again and again."""

    paths: tuple[Path, ...]
    options: TextOptions

    def __iter__(self) -> Iterator[str]:
        """Read the files in order."""
        for path in self.paths:
            for block in read_blocks(path, self.options):
                yield from chain.from_iterable(documents_of(block, self.options))


def train_tokenizer(
    sentences: Iterable[str], *, kind: TokenizerKind, vocab_size: int, lowercase: bool = True
) -> TextTokenizer:
    """Train a tokenizer.

    Args:
        sentences: the text; gone through more than once.
        kind: "wordpiece" with BERT's special tokens, "bpe" with <|endoftext|>, or "unigram" with <pad>, </s>, <unk> and
            T5's hundred sentinels, <extra_id_0> having the highest id.
        vocab_size: number of tokens, special ones included.
        lowercase: whether WordPiece lower-cases text and strips its accents; the others keep it.

    Raises:
        DataError: the text is too small or has too many characters for ``vocab_size``.
    """
    if kind == "wordpiece":
        return train_wordpiece(sentences, vocab_size=vocab_size, lowercase=lowercase)
    tokenizer = _train_bpe(sentences, vocab_size) if kind == "bpe" else _train_unigram(sentences, vocab_size)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise DataError(
            f"the text gives {found} different tokens, --vocab-size asks for {vocab_size}; set it to {found}, "
            "or use more text"
        )
    return TextTokenizer(tokenizer, name="trained vocabulary")


def _train_bpe(sentences: Iterable[str], vocab_size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise DataError(f"--vocab-size is {vocab_size}; the bytes alone take {len(alphabet)}, GPT-2 has 50257")
    tokenizer = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(in_batches(sentences), trainer)
    return tokenizer


def _train_unigram(sentences: Iterable[str], vocab_size: int) -> Tokenizer:
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(_NUM_SENTINELS))]
    if vocab_size <= len(sentinels) + 3:
        raise DataError(f"--vocab-size is {vocab_size}; special tokens alone take {len(sentinels) + 3}, T5 has 32100")
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\t", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(sentinels),
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",  # noqa: S106
        show_progress=False,
    )
    tokenizer.train_from_iterator(in_batches(sentences), trainer)
    tokenizer.add_special_tokens(sentinels)
    return tokenizer
