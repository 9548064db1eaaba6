"""Arrays on disk that are made once, for everyone who asks with the same inputs.

Knows how they are stored: one folder per combination of inputs, whose name stands for all of them, with one ``.npy``
file per array, read by memory map, so that the processes of a node share one copy. The folder appears by rename: whole
or not at all, whoever else makes it, on this node or on another that sees the same file system. A lock spares the
processes of a node the work of making it twice; nothing rests on it. Refuses to know what the arrays are.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chimera.errors import DataError

__all__ = ["Arrays", "Inputs", "cached_arrays", "default_cache_dir", "kept_arrays", "locked"]

Arrays = Mapping[str, NDArray[Any]]
Inputs = Mapping[str, str | int | float | bool | None]

_INPUTS: Final = "inputs.json"


def default_cache_dir() -> Path:
    """Return the user's cache folder for chimera: under ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chimera"


def cached_arrays(folder: Path, kind: str, inputs: Inputs, make: Callable[[], Arrays]) -> Arrays:
    """Map what ``make`` made of these inputs before, or make and keep it.

    Args:
        folder: of the cache; made if need be.
        kind: what the arrays are; begins the name.
        inputs: everything that they are a function of, the version of the code that makes them included.
        make: returns them by name.

    Raises:
        DataError: the folder cannot be written, or what is in it is damaged or was made of other inputs.
    """
    text = json.dumps(dict(inputs), sort_keys=True, indent=1)
    path = folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                if not path.exists():
                    _save(path, text, make())
        except OSError as error:
            raise DataError(
                f"{kind} cannot be kept in {folder}: {error.strerror or error}; set data.cache_dir to a folder that "
                "can be written"
            ) from error
    return _load(path, text)


def kept_arrays(
    folder: Path | None, kind: str, identity: Inputs | None, options: Inputs, make: Callable[[], Arrays]
) -> Arrays:
    """Do as ``cached_arrays`` for what is made of documents with an identity; where they have none, only make.

    Args:
        folder: of the cache; None where nothing is kept.
        kind: what the arrays are.
        identity: what the documents are a function of, see ``IndexedPart``.
        options: what else the arrays are a function of.
        make: returns them by name.
    """
    if folder is None or identity is None:
        return make()
    return cached_arrays(folder, kind, {**identity, **options, "kind": kind}, make)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock where the file system has them; the system drops it when its holder dies."""
    with path.open("a") as file:
        with suppress(OSError):  # some network file systems have none; then the work may be done twice
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _save(path: Path, text: str, arrays: Arrays) -> None:
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp"))
    try:
        for name, array in arrays.items():
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        (temporary / _INPUTS).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.rename(path)
    except OSError:
        if not path.exists():  # else another node was first, and what it made is the same
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(path: Path, text: str) -> Arrays:
    try:
        found = (path / _INPUTS).read_text(encoding="utf-8")
        arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(path.glob("*.npy"))}
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); delete the folder, it will be made again") from error
    if found != text:
        raise DataError(f"{path} was made with other settings than its name says; delete the folder")
    return arrays
