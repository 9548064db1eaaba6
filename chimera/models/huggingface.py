"""Weights under transformers' names, read and written: a state dict at once, or each rank its own part of a folder.

Tables of names say which of their tensors make one of ours; here they are followed, in both directions. A parameter
that tensor-parallel ranks share is read row by row or column by column, so that no process holds a whole model. Refuses
a tensor it has no place for, a place it has no tensor for, and two different tensors for one.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from chimera.errors import CheckpointError
from chimera.models.config import TransformerConfig
from chimera.models.huggingface_models import huggingface_model, huggingface_settings
from chimera.models.weight_files import FolderWeights, StateWeights, WeightSource, write_index, write_tensors
from chimera.models.weight_names import NameTable, Origin
from chimera.tensor.sharding import WHOLE, Piece, Sharding

__all__ = ["HuggingFaceWeights", "finish_huggingface", "from_huggingface", "to_huggingface", "write_huggingface"]


class HuggingFaceWeights:
    """The weights of one model, to be read by our names, whole or in part.

    Args:
        source: a folder of safetensors files, such a file, or a state dict.
        config: the model they are for.

    Raises:
        CheckpointError: names that are missing, unknown or double.
        ConfigError: transformers has no such model.
    """

    def __init__(self, source: Path | str | Mapping[str, Tensor], config: TransformerConfig) -> None:
        self._source: WeightSource = StateWeights(source) if isinstance(source, Mapping) else FolderWeights(source)
        self._table = huggingface_model(config).names(config)
        self._stored: dict[str, str] = {}
        for stored in self._source.names():
            name = self._table.standard(stored)
            if name is None:
                continue
            if name in self._stored:
                raise CheckpointError(f"two tensors stand for {name}, one of them named {stored}; keep one")
            self._stored[name] = stored
        self._resolve_twins()
        self._resolve_stand_ins()
        _require_same_names(self._stored, self._table.their_names, self._table, tied=config.tied_decoder)

    def part(self, name: str, sharding: Sharding, shape: Iterable[int]) -> Tensor:
        """Read this rank's part of a parameter.

        Args:
            name: ours, also a further one of a tied parameter.
            sharding: how the parameter lies over tensor-parallel ranks.
            shape: of this rank's part.

        Returns:
            The part in the type it is stored in, padding being 0.

        Raises:
            CheckpointError: the stored parameter has another shape.
        """
        origin = self._table.origins[self._table.ties.get(name, name)]
        here = tuple(shape)
        self._require_shape(name, origin, sharding.whole_shape(here))
        if not sharding.is_cut:
            parts = [self._read(stored, origin, ()) for stored in origin.names]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        found: Tensor | None = None
        for piece in sharding.pieces:
            part = self._piece(origin, sharding.dim, piece)
            found = part.new_zeros(here) if found is None else found
            found.narrow(sharding.dim or 0, piece.here, piece.length).copy_(part)
        return torch.zeros(here) if found is None else found

    def _piece(self, origin: Origin, dim: int | None, piece: Piece) -> Tensor:
        """Read some rows, which tensors that are joined share, or some columns, which each has its own of."""
        wanted = slice(piece.whole, piece.whole + piece.length)
        if dim == 1:
            return torch.cat([self._read(name, origin, (slice(None), wanted)) for name in origin.names])
        parts, first = [], 0
        for name in origin.names:
            count = self._rows(name, origin)
            rows = slice(max(wanted.start - first, 0), min(wanted.stop - first, count))
            if rows.start < rows.stop:
                parts.append(self._read(name, origin, (rows,)))
            first += count
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _read(self, name: str, origin: Origin, parts: tuple[slice, ...]) -> Tensor:
        """Read a part of one tensor as ours lie, out × in."""
        if origin.transposed:
            whole = (slice(None), slice(None))
            return self._source.read(self._stored[name], (*parts, *whole)[1::-1]).T
        return self._source.read(self._stored[name], parts)

    def _shape(self, name: str, origin: Origin) -> tuple[int, ...]:
        shape = self._source.shape(self._stored[name])
        return shape[::-1] if origin.transposed else shape

    def _rows(self, name: str, origin: Origin) -> int:
        return self._shape(name, origin)[0]

    def _require_shape(self, name: str, origin: Origin, needed: tuple[int, ...]) -> None:
        shapes = [self._shape(stored, origin) for stored in origin.names]
        if any(len(shape) != len(needed) for shape in shapes):
            joined: tuple[int, ...] = shapes[0]
        else:
            joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if joined != needed or len({shape[1:] for shape in shapes}) > 1:
            raise CheckpointError(
                f"weights of another size: {name} is {list(joined)}, the config needs {list(needed)}. Set the sizes of "
                "the [model] section to those of the weights"
            )

    def _resolve_twins(self) -> None:
        for twin, name in self._table.twins.items():
            if twin in self._stored and name in self._stored:
                self._require_equal(twin, name)
            stored = self._stored.pop(twin, None)
            if stored is not None:
                self._stored.setdefault(name, stored)

    def _require_equal(self, twin: str, name: str) -> None:
        first, second = (self._source.read(self._stored[one], ()) for one in (twin, name))
        if first is not second and not torch.equal(first, second):
            raise CheckpointError(
                f"{twin} and {name} differ, but a tied model has one tensor for both; "
                "if the decoder has its own, set [model] tied_decoder = false"
            )

    def _resolve_stand_ins(self) -> None:
        for name, stand_in in self._table.stand_ins.items():
            stored = self._stored.pop(stand_in, None)
            if stored is not None:
                self._stored.setdefault(name, stored)


def from_huggingface(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Rename transformers' weights to ours.

    Args:
        state: State dict of transformers' model, or of its part without heads where these are tied; not changed.
        config: The model to fill.

    Returns:
        What ``nn.Sequential(*layers).load_state_dict`` takes; a tied weight stands under all its names.

    Raises:
        CheckpointError: Names that are missing, unknown or double, shapes that are not the config's, or two different
            tensors for one tied weight.
        ConfigError: Transformers has no such model.
    """
    weights, table = HuggingFaceWeights(state, config), huggingface_model(config).names(config)
    shapes = _shapes_of(config)
    ours = {name: weights.part(name, WHOLE, shapes[name]) for name in table.origins}
    return ours | {name: ours[first] for name, first in table.ties.items()}


def to_huggingface(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Rename our weights to transformers'.

    Args:
        state: Weights under our names; of a tied weight the first one is enough. Not changed.
        config: The model they belong to.

    Returns:
        The state dict of transformers' model. Tensors are views of those given, and what is tied there is one tensor
        under several names.

    Raises:
        CheckpointError: Names that are missing or unknown, shapes that are not the config's, or two different tensors
            for one tied weight.
        ConfigError: Transformers has no such model.
    """
    table, ours = huggingface_model(config).names(config), dict(state)
    for name, first in table.ties.items():
        tied = ours.pop(name, None)
        if tied is not None and first in ours and tied is not ours[first] and not torch.equal(tied, ours[first]):
            raise CheckpointError(
                f"{first} and {name} differ, but a tied model has one tensor for both; "
                "if the decoder has its own, set [model] tied_decoder = false"
            )
        if tied is not None:
            ours.setdefault(first, tied)
    _require_same_names(ours, table.origins, table, tied=config.tied_decoder)
    theirs = _renamed(ours, config)
    for twin, name in (*table.twins.items(), *((twin, name) for name, twin in table.stand_ins.items())):
        theirs[twin] = theirs[name]
    return theirs


def write_huggingface(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    config: TransformerConfig,
    *,
    number: int = 0,
    count: int = 1,
) -> None:
    """Write some of our whole parameters as one of several files; ``finish_huggingface`` follows when all are there.

    Args:
        folder: is made where it does not exist.
        tensors: by our first names; over all files, each parameter once.
        config: the model they belong to.
        number: of the file, from 0.
        count: of the files.

    Raises:
        CheckpointError: a name that is no parameter's, or a shape that is not the config's.
    """
    unknown = sorted(set(tensors) - set(huggingface_model(config).names(config).origins))
    if unknown:
        raise CheckpointError(f"not parameters of this model: {', '.join(unknown)}; check [model] num_layers")
    write_tensors(Path(folder), _renamed(tensors, config), number=number, count=count)


def finish_huggingface(folder: Path | str, config: TransformerConfig, *, count: int = 1) -> None:
    """Write what goes with the ``count`` files of a folder: their index, and the model's ``config.json``.

    Raises:
        CheckpointError: a file is missing, a parameter stands nowhere, or one twice.
    """
    folder, table = Path(folder), huggingface_model(config).names(config)
    if count > 1:
        write_index(folder, count)
    written = set(FolderWeights(folder).names())
    missing = sorted(table.their_names - written)
    if missing:
        raise CheckpointError(f"{folder}: nobody wrote {', '.join(missing)}; every parameter has to be in some file")
    settings = {"architectures": [table.model], **huggingface_settings(config)}
    (folder / "config.json").write_text(f"{json.dumps(settings, indent=2)}\n", encoding="utf-8")


def _shapes_of(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = nn.Sequential(*huggingface_model(config).layers(config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _renamed(ours: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Return the tensors that parameters of ours consist of; views of them."""
    table, shapes = huggingface_model(config).names(config), _shapes_of(config)
    wrong = [
        f"{name} is {list(tensor.shape)}, the config needs {list(shapes[name])}"
        for name, tensor in ours.items()
        if tuple(tensor.shape) != shapes[name]
    ]
    if wrong:
        raise CheckpointError(f"weights of another size: {'; '.join(wrong)}. Set [model] to their sizes")
    theirs: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        origin = table.origins[name]
        rows = _rows_of(name, tensor, len(origin.names), config)
        for their_name, part in zip(
            origin.names, torch.split(tensor, rows) if len(rows) > 1 else (tensor,), strict=True
        ):
            theirs[their_name] = part.T if origin.transposed else part
    return theirs


def _rows_of(name: str, tensor: Tensor, count: int, config: TransformerConfig) -> list[int]:
    """Return how many rows each of the tensors has that one of ours is made of."""
    if name.split(".", 1)[1].startswith("attention.qkv."):
        heads = (config.num_heads, config.key_value_heads, config.key_value_heads)
        return [number * config.head_size for number in heads] if count == 3 else [len(tensor)]
    return [len(tensor) // count] * count


def _require_same_names(got: Iterable[str], needed: Iterable[str], table: NameTable, *, tied: bool) -> None:
    got, needed = set(got), set(needed)
    missing, unknown = sorted(needed - got), sorted(got - needed)
    complaints = []
    if missing:
        decoder = any("decoder.weight" in name or name.startswith("lm_head") for name in missing)
        hint = "; if the decoder's weight is the word embedding's, set [model] tied_decoder = true"
        complaints.append(f"missing: {', '.join(missing)}{hint if decoder and not tied else ''}")
    if unknown:
        complaints.append(f"unknown: {', '.join(unknown)}")
    if complaints:
        raise CheckpointError(
            f"these are not the weights of this model; {'; '.join(complaints)}. "
            f"Check [model] num_layers, and that the weights are a {table.model}'s"
        )
