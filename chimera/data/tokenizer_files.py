"""Tokenizers of other makers' files: GPT-2's two, SentencePiece models, and whatever a folder holds.

Knows which reader a file needs. The result is always a ``TextTokenizer``, so nothing downstream asks for its origin.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from chimera.data.sentencepiece_file import read_sentencepiece
from chimera.data.text_tokenizer import TextTokenizer
from chimera.data.tokenizer import WordPiece
from chimera.errors import ConfigError, DataError

__all__ = ["byte_level_tokenizer", "read_tokenizer"]

_VOCAB: Final = "vocab.json"
_MERGES: Final = "merges.txt"
_IN_FOLDERS: Final = ("tokenizer.json", _VOCAB, "vocab.txt", "tokenizer.model", "spiece.model")


def read_tokenizer(path: str | Path, *, lowercase: bool | None = None) -> TextTokenizer:
    """Read a tokenizer.

    Args:
        path: a vocab.txt of WordPiece, a tokenizer.json, GPT-2's vocab.json or merges.txt (with the other beside it), a
            SentencePiece model, or a folder that holds one of them.
        lowercase: whether to lower-case text and strip accents, for a vocab.txt alone; true when not given.

    Raises:
        ConfigError: ``lowercase`` was given for a file that says so itself.
        DataError: the file is missing, unreadable or none of these.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        path = _file_in(path)
    reader = _reader_of(path)
    if reader is None:
        return WordPiece.from_file(path, lowercase=lowercase)
    if lowercase is not None:
        raise ConfigError(f"lowercase is {lowercase}, but {path} says itself how text is normalised; leave it out")
    return reader(path)


def byte_level_tokenizer(model: models.BPE) -> Tokenizer:
    """Return GPT-2's splitting and byte mapping around a model."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _file_in(folder: Path) -> Path:
    for name in _IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} holds none of {', '.join(_IN_FOLDERS)}; give the tokenizer's file")


def _reader_of(path: Path) -> Callable[[Path], TextTokenizer] | None:
    """Return what reads a file, None where it is a vocab.txt."""
    if path.name.endswith(_MERGES) or path.name.endswith(_VOCAB):
        return _read_gpt2
    if path.suffix == ".json":
        return _read_json
    if path.suffix in {".model", ".spm"}:
        return _read_sentencepiece
    return None


def _read_json(path: Path) -> TextTokenizer:
    return TextTokenizer.from_json(_text(path), name=str(path))


def _read_gpt2(path: Path) -> TextTokenizer:
    """Read vocab.json and merges.txt, whatever stands before these words in both names."""
    known = _MERGES if path.name.endswith(_MERGES) else _VOCAB
    stem = path.name.removesuffix(known)
    vocabulary_path, merges_path = path.with_name(stem + _VOCAB), path.with_name(stem + _MERGES)
    try:
        vocabulary = json.loads(_text(vocabulary_path))
    except ValueError as error:
        raise DataError(f"{vocabulary_path} is no JSON: {error}") from None
    if not isinstance(vocabulary, dict) or not all(isinstance(number, int) for number in vocabulary.values()):
        raise DataError(f"{vocabulary_path}: needed: an object of token → id, as GPT-2's vocab.json is")
    lines = [line for line in _text(merges_path).split("\n") if line.strip() and not line.startswith("#version")]
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise DataError(f"{merges_path}: merge {number} is {line!r}; needed: two tokens and a space")
        merges.append((left, right))
    try:
        model = models.BPE(vocab=vocabulary, merges=merges)
    except Exception as error:  # noqa: BLE001, the library raises bare Exception
        raise DataError(f"{vocabulary_path} and {merges_path} do not belong together: {error}") from None
    tokenizer = byte_level_tokenizer(model)
    special = [token for token in vocabulary if token.startswith("<|") and token.endswith("|>")]
    tokenizer.add_special_tokens(special)
    return TextTokenizer(tokenizer, name=str(path))


def _read_sentencepiece(path: Path) -> TextTokenizer:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    return TextTokenizer(read_sentencepiece(content, name=str(path)), name=str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start + 1}") from None
