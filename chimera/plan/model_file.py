"""A model's sizes from a file: our configurations (TOML) and ``config.json`` of transformers, without torch.

Only what a plan needs is read; whether a configuration can train is ``train``'s business. A family that the planner
does not know is refused by name.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from chimera.errors import ConfigError, FormatError, nearest_names
from chimera.plan.shape import ModelShape

__all__ = [
    "HUGGING_FACE_FAMILIES",
    "batch_of",
    "read_document",
    "read_model",
    "shape_of_config",
    "shape_of_hugging_face",
]

_LONGEST: Final = 4096
"""Sequences are planned no longer than this where only the longest possible is known, as it is for Llama 3.1."""


def read_document(path: str | Path) -> Mapping[str, Any]:
    """Read a TOML or JSON file as nested values.

    Raises:
        ConfigError: there is no such file.
        FormatError: it is neither TOML nor a JSON object.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a configuration (TOML) or a config.json of a model") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"{path} is not a {'TOML' if path.suffix == '.toml' else 'JSON'} file: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{path} holds no JSON object; needed: a config.json of a model")
    return document


def read_model(path: str | Path, *, seq: int | None = None) -> ModelShape:
    """Read the shape of a model.

    Args:
        path: of a configuration (``.toml``) or of a ``config.json``.
        seq: length of sequences, in place of the file's.

    Raises:
        ConfigError: the file is missing, a size is missing or wrong, or the family is not known.
        FormatError: the file is neither TOML nor JSON.
    """
    document = read_document(path)
    try:
        if Path(path).suffix == ".toml":
            return shape_of_config(document, seq=seq)
        return shape_of_hugging_face(document, seq=seq)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def batch_of(path: str | Path) -> int | None:
    """Return the sequences of a step that a training configuration asks for; None where it or its file says nothing."""
    if Path(path).suffix != ".toml":
        return None
    document = read_document(path)
    train, schedule, parallel = (document.get(name) for name in ("train", "schedule", "parallel"))
    if not (isinstance(train, dict) and isinstance(schedule, dict) and isinstance(parallel, dict)):
        return None
    sizes = (
        train.get("microbatch_size"),
        train.get("accumulation_runs", 1),
        schedule.get("microbatches"),
        parallel.get("data", 1),
    )
    return math.prod(sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else None


def shape_of_config(document: Mapping[str, Any], *, seq: int | None = None) -> ModelShape:
    """Return the shape that a training configuration describes.

    Raises:
        ConfigError: a size is missing or wrong, or the family is not known.
    """
    model, data = document.get("model"), document.get("data", {})
    if not isinstance(model, dict) or not isinstance(data, dict):
        raise ConfigError("there is no section [model]; needed: a configuration as in configs/, or a config.json")
    family = model.get("family", "bert")
    if not isinstance(family, str) or family not in _OWN:
        raise ConfigError(
            f"[model] family = {family!r} is one the planner does not know{nearest_names(str(family), _OWN)}; "
            f"known: {', '.join(_OWN)}"
        )
    vocab = model.get("vocab_size", data.get("vocab_size"))
    length = data.get("sequence_length") if seq is None else seq
    if vocab is None or length is None:
        missing = "vocab_size in [model] or [data]" if vocab is None else "sequence_length in [data]"
        raise ConfigError(f"{missing} is missing, which the plan depends on")
    sizes: dict[str, Any] = {
        "family": family,
        "hidden": _size(model, "hidden_size"),
        "layers": _size(model, "num_layers"),
        "heads": _size(model, "num_heads"),
        "vocab": vocab,
        "seq": length,
        "ffn": model.get("intermediate_size"),
        "tied": bool(model.get("tied_decoder", family != "llama")),
    }
    return ModelShape(**sizes | _OWN[family](model))


_OWN: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = MappingProxyType(
    {
        "bert": lambda model: {"positions": model.get("max_positions", 512)},
        "gpt": lambda model: {"positions": model.get("max_positions", 1024)},
        "llama": lambda model: {"kv_heads": model.get("num_key_value_heads"), "gated": True},
        "t5": lambda model: {
            "layers": model.get("num_decoder_layers") or _size(model, "num_layers"),
            "encoder_layers": _size(model, "num_layers"),
            "head_size": model.get("key_value_size"),
            "gated": bool(model.get("gated", False)),
        },
    }
)
"""By ``[model] family``, what a shape has beside the sizes that all families share, from the names of our options."""


def shape_of_hugging_face(config: Mapping[str, Any], *, seq: int | None = None) -> ModelShape:
    """Return the shape that a ``config.json`` describes.

    >>> shape_of_hugging_face(
    ...     {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    ... ).hidden
    768

    Raises:
        ConfigError: the family is not known, or a size is missing or wrong.
    """
    kind = config.get("model_type")
    if kind is None:
        raise ConfigError(f"model_type is missing; needed: one of {', '.join(HUGGING_FACE_FAMILIES)}")
    if not isinstance(kind, str) or kind not in HUGGING_FACE_FAMILIES:
        raise ConfigError(
            f"model_type {kind!r} is a family the planner does not know"
            f"{nearest_names(str(kind), HUGGING_FACE_FAMILIES)}; known: {', '.join(HUGGING_FACE_FAMILIES)}"
        )
    return HUGGING_FACE_FAMILIES[kind](config, seq)


def _gpt2(config: Mapping[str, Any], seq: int | None) -> ModelShape:
    positions = _size(config, "n_positions")
    return ModelShape(
        family="gpt",
        hidden=_size(config, "n_embd"),
        layers=_size(config, "n_layer"),
        heads=_size(config, "n_head"),
        vocab=_size(config, "vocab_size"),
        seq=positions if seq is None else seq,
        ffn=_optional(config, "n_inner"),
        positions=max(positions, seq or 0),
        tied=_tied(config, default=True),
    )


def _bert(config: Mapping[str, Any], seq: int | None) -> ModelShape:
    positions = _size(config, "max_position_embeddings")
    return ModelShape(
        family="bert",
        hidden=_size(config, "hidden_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=_size(config, "num_attention_heads"),
        vocab=_size(config, "vocab_size"),
        seq=positions if seq is None else seq,
        ffn=_optional(config, "intermediate_size"),
        positions=max(positions, seq or 0),
        tied=_tied(config, default=True),
    )


def _t5(config: Mapping[str, Any], seq: int | None) -> ModelShape:
    layers = _size(config, "num_layers")
    return ModelShape(
        family="t5",
        hidden=_size(config, "d_model"),
        layers=_optional(config, "num_decoder_layers") or layers,
        encoder_layers=layers,
        heads=_size(config, "num_heads"),
        head_size=_optional(config, "d_kv"),
        vocab=_size(config, "vocab_size"),
        seq=(_optional(config, "n_positions") or 512) if seq is None else seq,
        ffn=_optional(config, "d_ff"),
        gated=str(config.get("feed_forward_proj", "relu")).startswith("gated"),
        tied=_tied(config, default=True),
    )


def _llama(config: Mapping[str, Any], seq: int | None) -> ModelShape:
    return ModelShape(
        family="llama",
        hidden=_size(config, "hidden_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=_size(config, "num_attention_heads"),
        kv_heads=_optional(config, "num_key_value_heads"),
        head_size=_optional(config, "head_dim"),
        vocab=_size(config, "vocab_size"),
        seq=min(_optional(config, "max_position_embeddings") or _LONGEST, _LONGEST) if seq is None else seq,
        ffn=_size(config, "intermediate_size"),
        gated=True,
        tied=_tied(config, default=False),
    )


HUGGING_FACE_FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any], int | None], ModelShape]]] = MappingProxyType(
    {"gpt2": _gpt2, "bert": _bert, "t5": _t5, "llama": _llama}
)
"""The families that are read, by transformers' ``model_type``."""


def _tied(config: Mapping[str, Any], *, default: bool) -> bool:
    value = config.get("tie_word_embeddings", default)
    if not isinstance(value, bool):
        raise ConfigError(f"tie_word_embeddings = {value!r}; needed: true or false")
    return value


def _optional(values: Mapping[str, Any], key: str) -> int | None:
    """Return a size, None where the file says nothing or null."""
    return None if values.get(key) is None else _size(values, key)


def _size(values: Mapping[str, Any], key: str) -> int:
    if key not in values:
        raise ConfigError(f"{key} is missing")
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} = {value!r}; needed: a whole number of at least 1")
    return value
