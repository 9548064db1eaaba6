"""What is in a checkpoint, told from the heads of its files: no tensor is read unless it is asked for by name.

Whether it is whole is judged by the configuration that it carries: the model's parameters, each with its shape, and the
optimizer's moments of each. What tensors are for says ``state``, how files are written ``checkpoint``.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from chimera.errors import CheckpointError, ConfigError
from chimera.models.config import TransformerConfig
from chimera.train.checkpoint import Checkpoint
from chimera.train.config import TrainConfig
from chimera.train.config_file import make_config
from chimera.train.families import layers_of
from chimera.train.state import MODEL, OPTIMIZER

__all__ = ["StoredTensor", "config_of", "faults", "parameter_shapes", "read_tensor", "stored_tensors"]

_MOST_NAMED = 5
"""Of tensors that are missing or unknown, so many are named."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        name: with its part, ``model.`` or ``optimizer.<moment>.``, in front of the parameter's.
        shape: whole, without padding.
        dtype: as the format calls it, such as F32.
        num_bytes: of its values.
        file: that it is in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    file: Path

    @property
    def num_elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint by name, in the order of the names.

    Raises:
        CheckpointError: a file is damaged, or two files have a tensor of one name.
    """
    found: dict[str, StoredTensor] = {}
    for path in sorted(checkpoint.path.glob("*.safetensors")):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping, but a file that has such a method
                if name in found:
                    raise CheckpointError(
                        f"{checkpoint.path}: {name} is both in {found[name].file.name} and {path.name}"
                    )
                head = file.get_slice(name)
                shape, dtype = tuple(head.get_shape()), str(head.get_dtype())
                found[name] = StoredTensor(name, shape, dtype, math.prod(shape) * _item_bytes(dtype), path)
    return dict(sorted(found.items(), key=lambda item: _in_order(item[0])))


def read_tensor(tensor: StoredTensor) -> Tensor:
    """Return the values of a tensor, on the CPU.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _opened(tensor.file) as file:
        read: Tensor = file.get_tensor(tensor.name)
        return read


def config_of(checkpoint: Checkpoint) -> TrainConfig:
    """Return the configuration of the run that a checkpoint belongs to.

    Raises:
        CheckpointError: it has none that this release knows.
    """
    description = checkpoint.description.get("config")
    try:
        if not isinstance(description, Mapping):
            raise ConfigError("it has none")
        return make_config(description, where="its configuration")
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path} was saved by another release: {error}") from None


def parameter_shapes(model: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model by name, tied ones once, in the model's order."""
    with torch.device("meta"):
        layers = nn.Sequential(*layers_of(model))
    return {name: tuple(parameter.shape) for name, parameter in layers.named_parameters()}


def faults(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], config: TrainConfig) -> list[str]:
    """Return what keeps a checkpoint's tensors from being the state of its run; nothing where they are whole."""
    shapes = parameter_shapes(config.model)
    # Before the first update there are no moments.
    moments = config.optimizer.moments if checkpoint.description["progress"]["updates"] else ()
    parts = [MODEL, *(f"{OPTIMIZER}.{moment}" for moment in moments)]
    needed = {f"{part}.{name}": shape for part in parts for name, shape in shapes.items()}
    found = []
    for what, names in (
        ("missing", [name for name in needed if name not in stored]),
        ("unknown", [name for name in stored if name not in needed]),
    ):
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            found.append(f"{what}: {', '.join(names[:_MOST_NAMED])}{more}")
    return found + [
        f"{name} is {list(stored[name].shape)}, needed: {list(shape)}"
        for name, shape in needed.items()
        if name in stored and stored[name].shape != shape
    ]


def _in_order(name: str) -> tuple[str, int, str]:
    """Return what sorts the tensors of a part by the number of their layer."""
    part, rest = name.split(".", 1) if "." in name else (name, "")
    if part == OPTIMIZER and "." in rest:
        moment, rest = rest.split(".", 1)
        part = f"{part}.{moment}"
    number = rest.partition(".")[0]
    return part, int(number) if number.isdecimal() else -1, rest


def _item_bytes(dtype: str) -> int:
    digits = "".join(filter(str.isdecimal, dtype.split("_", maxsplit=1)[0]))
    return max(1, int(digits) // 8) if digits else 1


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the checkpoint is damaged") from None
