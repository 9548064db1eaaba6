"""Reading a file as strict JSON, and writing any file so that a reader sees the old one or the whole new one.

It knows nothing of what the files hold. A file may come from a hostile hand: its size is bounded, and numbers that JSON
does not have (NaN, Infinity), keys given twice and endless nesting are refused. A write goes to a temporary name beside
the target, which replaces it at the end.
"""

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import Repr
from typing import Any, Final

from chimera.errors import FormatError, nearest_names

__all__ = ["check_keys", "making_folder", "parse_json_object", "read_json_object", "read_text", "replacing", "shown"]

_MAX_BYTES: Final = 512 * 1024 * 1024
_MAX_KEY: Final = 100

_shortened = Repr()
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = 60


def shown(value: object) -> str:
    """Return a short form of any value from a file, for an error message."""
    return _shortened.repr(value)


def read_text(path: str | Path, what: str) -> str:
    """Return the text of a file, which ``what`` names in errors; a byte order mark is no part of it.

    Raises:
        FormatError: the file cannot be read, is over 512 MiB or is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) <= _MAX_BYTES:
            return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read as a {what}: {error}") from error
    raise FormatError(f"{path}: is larger than {_MAX_BYTES >> 20} MiB, too large for a {what}")


def read_json_object(path: str | Path, *, format_name: str, version: int) -> dict[str, Any]:
    """Read the JSON object in ``path``, check its ``format`` and ``version`` and return its other members.

    Raises:
        FormatError: the file is missing, is not strict JSON, or is of another format or version.
    """
    text = read_text(path, f"{format_name} file")
    try:
        return parse_json_object(text, format_name=format_name, version=version)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def parse_json_object(text: str, *, format_name: str, version: int) -> dict[str, Any]:
    """Do what ``read_json_object`` does for a text.

    Raises:
        FormatError: the text is not strict JSON, or is of another format or version.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object_without_repeats)
    except RecursionError:
        raise FormatError(f"not a {format_name} file: it is nested far too deeply") from None
    except ValueError as error:
        raise FormatError(f"not a {format_name} file: {error}") from error
    if not isinstance(data, dict):
        raise FormatError(f'got a JSON {type(data).__name__}; needed: {{"format": "{format_name}", …}}')
    if data.get("format") != format_name:
        raise FormatError(f'got "format": {shown(data.get("format"))}; needed: "{format_name}"')
    if data.get("version") != version or isinstance(data["version"], bool):
        got = shown(data.get("version"))
        raise FormatError(f'got "version": {got} of {format_name}; this program reads version {version}')
    return {key: value for key, value in data.items() if key not in {"format", "version"}}


def check_keys(data: Mapping[str, Any], *, required: Collection[str], optional: Collection[str], where: str) -> None:
    """Refuse unknown keys, naming the nearest known one, and missing keys.

    Raises:
        FormatError: a key of ``data`` is neither required nor optional, or a required one is absent.
    """
    known = {*required, *optional}
    for key in data:
        if key not in known:
            hint = nearest_names(key[:_MAX_KEY], known)
            raise FormatError(f"{where}: unknown key {shown(key)}{hint}; known: {_listed(known)}")
    if missing := set(required) - data.keys():
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


@contextmanager
def making_folder(path: Path) -> Iterator[None]:
    """Make the folder where it is missing; after an exception, what was made goes again, unless something is in it."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {shown(repeated)} is given twice")
    return data


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys))
