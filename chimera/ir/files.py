"""Reading a file as strict JSON, and writing any file so that a reader sees the old one or the whole new one.

It knows nothing of what the files hold. Numbers that JSON does not have (NaN, Infinity) and keys given twice are
refused on reading; a write goes to a temporary name beside the target, which replaces it at the end.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chimera.errors import FormatError, nearest_names

__all__ = ["check_keys", "read_json_object", "replacing"]


def read_json_object(path: str | Path, *, format_name: str, version: int) -> dict[str, Any]:
    """Read the JSON object in ``path``, check its ``format`` and ``version`` and return its other members.

    Raises:
        FormatError: the file is missing, is not strict JSON, or is of another format or version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read as a {format_name} file: {error}") from error
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object_without_repeats)
    except ValueError as error:
        raise FormatError(f"{path}: not a {format_name} file: {error}") from error
    if not isinstance(data, dict):
        raise FormatError(f'{path}: got a JSON {type(data).__name__}; needed: {{"format": "{format_name}", …}}')
    if data.get("format") != format_name:
        raise FormatError(f'{path}: got "format": {data.get("format")!r}; needed: "{format_name}"')
    if data.get("version") != version or isinstance(data["version"], bool):
        raise FormatError(
            f'{path}: got "version": {data.get("version")!r} of {format_name}; this program reads version {version}'
        )
    return {key: value for key, value in data.items() if key not in {"format", "version"}}


def check_keys(data: dict[str, Any], *, required: set[str], optional: set[str], where: str) -> None:
    """Refuse unknown keys, naming the nearest known one, and missing keys.

    Raises:
        FormatError: a key of ``data`` is neither required nor optional, or a required one is absent.
    """
    known = required | optional
    for key in data:
        if key not in known:
            raise FormatError(f"{where}: unknown key {key!r}{nearest_names(key, known)}; known: {_listed(known)}")
    if missing := required - data.keys():
        raise FormatError(f"{where}: missing {_listed(missing)}")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` with the same suffix; on success it takes ``path``'s place.

    The folder is made when it does not exist. After an exception neither the temporary file nor a half-written target
    is left.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; a finished file gets the mode that opening it directly would have given.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} is given twice")
    return data


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys))
