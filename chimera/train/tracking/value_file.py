"""A frozen dataclass as a small JSON file: written whole or not at all, read strictly, whoever may have written it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from chimera.errors import FormatError
from chimera.ir.files import read_json_object, replacing, shown

__all__ = ["STRICT", "read_value", "write_value"]

STRICT: Final = ConfigDict(extra="forbid", allow_inf_nan=False)
"""For ``__pydantic_config__`` of the dataclasses: an unknown key, infinity and NaN are errors."""
_VERSION: Final = 1
_T = TypeVar("_T")


def write_value(value: Any, path: Path, format_name: str, **more: Any) -> None:
    """Write a dataclass, and ``more`` for readers other than ``read_value``.

    Raises:
        OSError: the system cannot.
    """
    document = {"format": format_name, "version": _VERSION, **more, **asdict(value)}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_value(type_: type[_T], path: Path, format_name: str, *, apart: str | None = None) -> _T:
    """Read a dataclass; the member ``apart``, if any, is for other readers.

    Raises:
        FormatError: the file is missing, or not such a value; the message gives the place in it.
    """
    data = read_json_object(path, format_name=format_name, version=_VERSION)
    if apart is not None:
        data.pop(apart, None)
    try:
        # As JSON, whose lists may become tuples and whose whole numbers floats, and nothing else.
        return TypeAdapter(type_).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise FormatError(
            f"{path}: {shown(place)} is {shown(first['input'])}: {first['msg'].lower()}; needed: a {format_name} file"
        ) from None
