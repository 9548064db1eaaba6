"""A configuration from a TOML file and ``--section.key value`` overrides, and back to TOML.

Every key has to be one that exists, with a value of its type; what is wrong is named with its place and the nearest
right name. ``"none"`` stands for no value, which TOML has no word for. An override is what would stand behind the
equals sign, quotes being optional. Three values follow from others where they are left out:
``learning_rate.total_steps`` is ``train.steps``, ``model.vocab_size`` the size of the vocabulary, and ``data.samples``
what ``model.family`` learns from. That family also says which options ``[model]`` has.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from chimera.data.config import DEFAULT_VOCAB_SIZE
from chimera.data.t5_samples import NUM_SENTINELS
from chimera.errors import ConfigError, nearest_names
from chimera.models.config import TransformerConfig
from chimera.train.config import TrainConfig
from chimera.train.families import FAMILIES

__all__ = [
    "SECTIONS",
    "file_sets",
    "load_config",
    "make_config",
    "section_classes",
    "section_types",
    "to_toml",
    "type_text",
]

_Values = dict[str, dict[str, Any]]
_NONE: Final = "none"

SECTIONS: Final[Mapping[str, type[Any]]] = get_type_hints(TrainConfig)
"""The dataclass of each section, in the order of ``TrainConfig``; of ``[model]`` what all families share."""

_MODEL: Final = "model"
_DEFAULT_FAMILY: Final = "bert"


def load_config(path: str | Path, overrides: Mapping[str, str] | None = None) -> TrainConfig:
    """Read a TOML file and apply overrides, ``section.key`` → text.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, a value is of another type or out of range,
            or options contradict each other.
    """
    return make_config(_document(Path(path)), overrides, where=str(path))


def file_sets(path: str | Path, section: str, key: str) -> bool:
    """Whether a file gives a value to an option.

    Raises:
        ConfigError: the file cannot be read.
    """
    table = _document(Path(path)).get(section)
    return isinstance(table, Mapping) and key in table


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a configuration file (TOML)") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def make_config(
    document: Mapping[str, Any], overrides: Mapping[str, str] | None = None, *, where: str = "configuration"
) -> TrainConfig:
    """Make a configuration of nested values, as ``load_config`` does of a file; messages begin with ``where``."""
    values: _Values = {name: {} for name in SECTIONS}
    for section, table in document.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{where}: unknown section [{section}]{nearest_names(section, SECTIONS)}; known: {', '.join(SECTIONS)}"
            )
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: {section} = {table!r} is a value; needed: a section [{section}] with keys")
        for key, value in table.items():
            values[section][key] = _checked(section, key, value, f"{where}: {section}.{key}")
    for name, text in (overrides or {}).items():
        section, _, key = name.replace("-", "_").partition(".")
        if section not in SECTIONS or not key:
            raise ConfigError(
                f"--{name}: unknown section {section!r}{nearest_names(section, SECTIONS)}; needed: --section.key, "
                f"the section being one of {', '.join(SECTIONS)}"
            )
        values[section][key] = _checked(section, key, _from_text(section, key, text), f"--{name}")
    types = {**SECTIONS, _MODEL: _model_class(values[_MODEL], where)}
    _derive(values, where)
    _require_all(values, types, where)
    try:
        return TrainConfig(**{name: types[name](**options) for name, options in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_toml(config: TrainConfig) -> str:
    """Write every option; reading the text gives the same configuration back."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        values = getattr(config, section)
        for option in dataclasses.fields(values):
            value = getattr(values, option.name)
            if value is not None or option.default is not None:
                lines.append(f"{option.name} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def section_classes(section: str) -> tuple[type[Any], ...]:
    """Return the dataclasses whose options a section may have: one, or that of each family for ``[model]``."""
    return tuple(family.config for family in FAMILIES.values()) if section == _MODEL else (SECTIONS[section],)


@cache
def section_types(section: str) -> Mapping[str, Any]:
    """Return the type of each key that a section may have."""
    found: dict[str, Any] = {}
    for class_ in section_classes(section):
        hints = get_type_hints(class_)
        found |= {option.name: hints[option.name] for option in dataclasses.fields(class_)}
    return found


def type_text(section: str, key: str) -> str:
    """Return what a value of a key looks like, for help texts.

    >>> type_text("train", "steps"), type_text("train", "dtype"), type_text("model", "dropout")
    ('N', '{fp32,bf16,fp16,fp8}', 'X')
    """
    short = {int: "N", float: "X", bool: "{true,false}", str: "TEXT"}
    member = next(member for member in _members(section_types(section)[key]) if member is not NoneType)
    if get_origin(member) is tuple:
        return f"[{','.join(short.get(part, '…') for part in get_args(member))}]"
    return short.get(member) or f"{{{','.join(get_args(member))}}}"


def _checked(section: str, key: str, value: Any, where: str) -> Any:
    """Return ``value`` as the type of its key, or say what it should be."""
    types = section_types(section)
    if key not in types:
        elsewhere = [other for other in SECTIONS if key in section_types(other)]
        hint = nearest_names(key, types) or (f" (it belongs to [{elsewhere[0]}])" if elsewhere else "")
        raise ConfigError(f"{where} is unknown{hint}; [{section}] has: {', '.join(types)}")
    if value == _NONE and NoneType in get_args(types[key]):
        return None
    try:
        # TOML's values are JSON's; as such a list may become a tuple and a whole number a float, and nothing else.
        return TypeAdapter(types[key]).validate_json(_json_of(value), strict=True)
    except ValidationError:
        raise ConfigError(f"{where} = {value!r}; needed: {_describe(types[key])}") from None


def _from_text(section: str, key: str, text: str) -> Any:
    """Return an override's text as the TOML value it stands for, or as text where it is none."""
    if str in _members(section_types(section).get(key, str)) and not text.startswith(('"', "'")):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _model_class(options: Mapping[str, Any], where: str) -> type[TransformerConfig]:
    """Return the configuration class of the family, whose options these have to be."""
    name = options.get("family", _DEFAULT_FAMILY)
    class_ = FAMILIES[name].config
    known = {option.name for option in dataclasses.fields(class_)}
    for key in options:
        if key not in known:
            owners = [other for other, family in FAMILIES.items() if key in family.config.__dataclass_fields__]
            raise ConfigError(
                f"{where}: model.{key} is an option of family {' and '.join(owners)}, not of {name}; leave it out, or "
                f"set model.family"
            )
    return class_


def _derive(values: _Values, where: str) -> None:
    """Fill in what follows from other options."""
    family = values[_MODEL].get("family", _DEFAULT_FAMILY)
    values["data"].setdefault("samples", FAMILIES[family].samples)
    if "total_steps" not in values["learning_rate"] and "steps" in values["train"]:
        values["learning_rate"]["total_steps"] = values["train"]["steps"]
    model, data = values["model"], values["data"]
    if "vocab_size" in model:
        return
    adds_sentinels = data["samples"] == "t5"
    if data.get("vocabulary") is not None and (data.get("vocab_size") is None or adds_sentinels):
        raise ConfigError(
            f"{where}: data.vocabulary is a file, so model.vocab_size does not follow from the options; set "
            f"{'' if adds_sentinels else 'data.vocab_size or '}model.vocab_size to the number of its tokens"
        )
    model["vocab_size"] = (data.get("vocab_size") or DEFAULT_VOCAB_SIZE) + NUM_SENTINELS * adds_sentinels


def _require_all(values: _Values, types: Mapping[str, type[Any]], where: str) -> None:
    missing = [
        f"{section}.{option.name}"
        for section, type_ in types.items()
        for option in dataclasses.fields(type_)
        if option.default is dataclasses.MISSING
        and option.default_factory is dataclasses.MISSING
        and option.name not in values[section]
    ]
    if missing:
        raise ConfigError(
            f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; set "
            f"{'it' if len(missing) == 1 else 'them'} in the file or on the command line, as in --{missing[0]} VALUE"
        )


def _members(type_: Any) -> tuple[Any, ...]:
    return get_args(type_) if get_origin(type_) in {Union, UnionType} else (type_,)


def _describe(type_: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: f'"{_NONE}"'}
    described = []
    for member in _members(type_):
        if get_origin(member) is tuple and Ellipsis in get_args(member):
            described.append(f"a list, each item {names[get_args(member)[0]]}")
        elif get_origin(member) is tuple:
            described.append(f"a list of {len(get_args(member))} numbers")
        elif member in names:
            described.append(names[member])
        else:
            described += [f'"{choice}"' for choice in get_args(member)]
    return " or ".join(described)


def _json_of(value: Any) -> str:
    return TypeAdapter(Any, config={"ser_json_inf_nan": "constants"}).dump_json(value).decode()


def _toml_value(value: Any) -> str:
    if value is None:
        return f'"{_NONE}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)
