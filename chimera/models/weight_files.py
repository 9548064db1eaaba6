"""Weights in safetensors files: a folder with one file, or several with an index, read piece by piece.

Opening reads names and shapes; a tensor's rows or columns are read when asked for, so no process holds more of a model
than it uses. Files are written beside one another by whoever has the tensors, and the index from their headers. Knows
no architecture and no names but what the files say.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from chimera.errors import CheckpointError
from chimera.ir.files import replacing

__all__ = ["FolderWeights", "StateWeights", "WeightSource", "write_index", "write_tensors"]

_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MOST_HEADER_BYTES: Final = 100_000_000


class WeightSource(Protocol):
    """Tensors by name, of which parts can be read."""

    where: str

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    def read(self, name: str, parts: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor; dimensions that ``parts`` leaves out come whole."""


class StateWeights:
    """Tensors in memory.

    Args:
        state: by name; not changed.
    """

    where = "the weights"

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._state[name].shape)

    def read(self, name: str, parts: tuple[slice, ...]) -> Tensor:
        """Return a view of a part of a tensor; the tensor itself where that is all of it."""
        tensor = self._state[name]
        return tensor[parts] if any(part != slice(None) for part in parts) else tensor


class FolderWeights:
    """Tensors in a folder of safetensors files, or in one such file.

    Args:
        path: of the folder or the file.

    Raises:
        CheckpointError: no weights there, or a file or an index that is none.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.where = str(path)
        self._files = _files_of(path)
        headers = {file: _header(file) for file in sorted(set(self._files.values()))}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, file in self._files.items():
            if name not in headers[file]:
                raise CheckpointError(
                    f"{path}: the index says that {name} is in {file.name}, which does not have it; get both anew"
                )
            self._shapes[name] = headers[file][name]

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str, parts: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor.

        Raises:
            CheckpointError: the file is damaged.
        """
        with _opened(self._files[name]) as file:
            tensor: Tensor = file.get_slice(name)[parts] if parts else file.get_tensor(name)
            return tensor


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], *, number: int = 0, count: int = 1) -> None:
    """Write tensors as file ``number``, from 0, of ``count`` in ``folder``, complete or not at all.

    With several files, ``write_index`` has to follow once all are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (_ONE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors")
    # The format takes no views that share storage, as parts of one fused matrix do.
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(copies, temporary, {"format": "pt"})


def write_index(folder: Path, count: int) -> None:
    """Write the index of ``count`` files that ``write_tensors`` made.

    Raises:
        CheckpointError: a file is missing, or two have a tensor of one name.
    """
    files = [folder / f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    of_tensor: dict[str, str] = {}
    num_bytes = 0
    for file in files:
        for name in _header(file):
            if name in of_tensor:
                raise CheckpointError(f"{folder}: {name} is both in {of_tensor[name]} and in {file.name}")
            of_tensor[name] = file.name
        num_bytes += file.stat().st_size - _data_start(file)
    text = json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(of_tensor.items()))}, indent=2)
    partial = folder / f"{_INDEX}.partial"
    partial.write_text(f"{text}\n", encoding="utf-8")
    partial.replace(folder / _INDEX)


def _files_of(path: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    if path.is_file():
        return dict.fromkeys(_header(path), path)
    if (path / _INDEX).is_file():
        return _files_of_index(path / _INDEX)
    if (path / _ONE).is_file():
        return dict.fromkeys(_header(path / _ONE), path / _ONE)
    raise CheckpointError(
        f"{path} has no weights; needed: a folder with {_ONE} or {_INDEX}, or a safetensors file. Files of other "
        "formats (pytorch_model.bin) hold pickled code and are not read; save them as safetensors first"
    )


def _files_of_index(index: Path) -> dict[str, Path]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
        pairs = [(str(name), str(file)) for name, file in content["weight_map"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error}; get it anew") from None
    outside = sorted({file for _, file in pairs if file in {"", ".", ".."} or "/" in file or "\\" in file})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder ({', '.join(outside)}); they are not read")
    return {name: index.parent / file for name, file in pairs}


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a file; the format's other rules are checked when it is opened."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            content = json.loads(file.read(length), object_pairs_hook=_without_doubles)
        content.pop("__metadata__", None)
        return {name: tuple(int(size) for size in entry["shape"]) for name, entry in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}; get it anew") from None


def _data_start(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int(struct.unpack("<Q", file.read(8))[0])


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; one that says a name twice is ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}; get it anew") from None
