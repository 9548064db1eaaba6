"""SentencePiece models as tokenizers of the ``tokenizers`` library.

Knows the few fields of the model's protocol buffer that decide how text is cut (google/sentencepiece,
``sentencepiece_model.proto``), and how they are said to the library. So a model of T5 or Llama needs no second library
at run time.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from chimera.errors import DataError

__all__ = ["read_sentencepiece"]

_SPACE: Final = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NO_TEXT: Final = {_UNKNOWN, _CONTROL, _UNUSED}
_UNIGRAM, _BPE = 1, 2

_Value = int | bytes


@dataclass(slots=True)
class _Model:
    """What decides how text is cut, with the format's own defaults."""

    pieces: list[tuple[str, float]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    type: int = _UNIGRAM
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_sentencepiece(content: bytes, *, name: str) -> Tokenizer:
    """Make a tokenizer of a model's bytes; ``name`` stands for the file in messages.

    Raises:
        DataError: they are no SentencePiece model, or one of words or characters.
    """
    try:
        model = _parsed(content)
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{name} is no SentencePiece model ({error}); give the .model file") from None
    if not model.pieces or _UNKNOWN not in model.kinds:
        raise DataError(f"{name} is no SentencePiece model: it has no pieces; give the .model file")
    if model.type not in {_UNIGRAM, _BPE}:
        raise DataError(f"{name} is a model of words or characters; known: unigram and BPE")
    tokenizer = Tokenizer(_unigram(model) if model.type == _UNIGRAM else _bpe(model))
    _dress(tokenizer, model)
    return tokenizer


def _unigram(model: _Model) -> models.Unigram:
    return models.Unigram(model.pieces, model.kinds.index(_UNKNOWN), _BYTE in model.kinds)


def _bpe(model: _Model) -> models.BPE:
    """Merges are not in the file: they are all splits of a piece into two pieces, the best-scored piece first."""
    ids = {piece: number for number, (piece, _) in enumerate(model.pieces)}
    merges: list[tuple[float, int, int, str, str]] = []
    for (piece, score), kind in zip(model.pieces, model.kinds, strict=True):
        if kind != _NORMAL:
            continue
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    unknown = model.pieces[model.kinds.index(_UNKNOWN)][0]
    return models.BPE(
        vocab=ids,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in model.kinds,
    )


def _dress(tokenizer: Tokenizer, model: _Model) -> None:
    """Add normalisation, the mark of spaces, decoding and the special tokens."""
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.add_dummy_prefix else "never"
    # BPE merges across words where a piece spans them, as the original does; unigram pieces never do.
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=model.type == _UNIGRAM)
    ]
    control = [piece for (piece, _), kind in zip(model.pieces, model.kinds, strict=True) if kind in _NO_TEXT]
    if control:
        # Such a piece is no text: where a sentence says "<s>", it is cut behind the first character, and so is not met.
        heads = "|".join(f"{re.escape(piece[0])}(?={re.escape(piece[1:])})" for piece in control if len(piece) > 1)
        splits.append(pre_tokenizers.Split(Regex(heads), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme),
        ]
    )
    special = [
        AddedToken(piece, normalized=kind == _USER_DEFINED, special=kind != _USER_DEFINED)
        for (piece, _), kind in zip(model.pieces, model.kinds, strict=True)
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]
    tokenizer.add_tokens([token for token in special if not token.special])
    tokenizer.add_special_tokens([token for token in special if token.special])


def _parsed(content: bytes) -> _Model:
    model = _Model()
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            score = struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))[0]
            model.pieces.append((_bytes(piece[1]).decode(), score))
            model.kinds.append(_int(piece.get(3, _NORMAL)))
        elif number == 2:
            model.type = _int(dict(_fields(_bytes(value))).get(3, _UNIGRAM))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
            model.charsmap = _bytes(normalizer.get(2, b""))
            model.add_dummy_prefix = bool(normalizer.get(3, 1))
            model.remove_extra_whitespaces = bool(normalizer.get(4, 1))
    return model


def _fields(content: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield (field number, value) of a protocol buffer: whole numbers, or bytes of anything longer."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        kind = tag & 7
        if kind == 0:
            number, at = _varint(content, at)
            yield tag >> 3, number
            continue
        if kind == 2:
            size, at = _varint(content, at)
        elif kind in {1, 5}:
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field type {kind} at byte {at}")
        if at + size > len(content):
            raise ValueError(f"it ends inside the field at byte {at}")
        yield tag >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number without end at byte {at}")


def _bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where text should be")  # noqa: TRY004
    return value


def _int(value: _Value) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number should be")  # noqa: TRY004
    return value
