"""Checkpoints to transformers' weights and from them, file by file, so that the model need not fit into memory.

One process, no ranks: what a run in progress does with its own weights is ``weights``' business.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import torch
from safetensors.torch import save_file

from chimera.errors import CheckpointError, ConfigError
from chimera.models.config import TransformerConfig
from chimera.models.huggingface import HuggingFaceWeights, finish_huggingface, write_huggingface
from chimera.tensor.sharding import WHOLE
from chimera.train.checkpoint import Checkpoint, building_checkpoint
from chimera.train.config import TrainConfig
from chimera.train.folder import CHECKPOINTS, check_folder, checkpoint_path
from chimera.train.layout import layout_of
from chimera.train.state import MODEL, describe
from chimera.train.stored import StoredTensor, config_of, faults, parameter_shapes, read_tensor, stored_tensors
from chimera.train.updating import updating_of

__all__ = ["EXPORT_TYPES", "export_checkpoint", "import_checkpoint"]

EXPORT_TYPES: Final[Mapping[str, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_FP32_BYTES: Final = 4
_T = TypeVar("_T")


def export_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    file_bytes: int,
    report: Callable[[int, int], None] | None = None,
) -> TransformerConfig:
    """Write a checkpoint's weights into a new folder as transformers reads them, whole or not at all.

    Args:
        checkpoint: of a run of a model that transformers has.
        out: the folder; it is made.
        dtype: of the weights written; those of a checkpoint are fp32.
        file_bytes: most bytes of one file, but of one with a single larger tensor; about twice as much is in memory.
        report: called with the files written and those in all.

    Returns:
        The model that it was.

    Raises:
        CheckpointError: ``out`` is there already, or the checkpoint is not whole.
        ConfigError: transformers has no such model; a weight does not fit into ``dtype``.
    """
    if out.exists():
        raise CheckpointError(f"{out} is there already; give a folder that is not")
    config, stored = config_of(checkpoint), stored_tensors(checkpoint)
    if found := faults(checkpoint, stored, config):
        raise CheckpointError(f"{checkpoint.path} is not whole: {'; '.join(found)}")
    weights = [tensor for name, tensor in stored.items() if name.startswith(f"{MODEL}.")]
    item_bytes = torch.empty((), dtype=dtype).element_size()
    files = _in_files(weights, [tensor.num_elements * item_bytes for tensor in weights], file_bytes)
    building = out.with_name(f".{out.name}.partial")
    shutil.rmtree(building, ignore_errors=True)  # what a killed export left
    try:
        for number, tensors in enumerate(files):
            read = {tensor.name.removeprefix(f"{MODEL}."): _read(tensor, dtype) for tensor in tensors}
            write_huggingface(building, read, config.model, number=number, count=len(files))
            if report is not None:
                report(number + 1, len(files))
        finish_huggingface(building, config.model, count=len(files))
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return config.model


def import_checkpoint(
    source: Path, config: TrainConfig, *, file_bytes: int, report: Callable[[int, int], None] | None = None
) -> Path:
    """Write transformers' weights as the checkpoint of step 0 of a run, which goes on from there when it is resumed.

    Args:
        source: a folder of safetensors files, or one such file.
        config: of the run, whose folder must be free.
        file_bytes: as for ``export_checkpoint``.
        report: likewise.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: the folder holds a run, ``train.weights`` is set as well, or transformers has no such model.
        CheckpointError: the weights are not those of such a model, or a file is damaged.
    """
    if config.train.weights is not None:
        raise ConfigError(
            f"[train] weights = {config.train.weights!r} would be read at the start of the run; leave it out, since "
            "the checkpoint takes its place"
        )
    check_folder(config, resume=False)
    layout = layout_of(config)
    weights, shapes = HuggingFaceWeights(source, config.model), parameter_shapes(config.model)
    files = _in_files(list(shapes), [math.prod(shape) * _FP32_BYTES for shape in shapes.values()], file_bytes)
    progress = updating_of(layout.schedule, config.optimizer, config.learning_rate, config.loss_scale_if_any).progress
    folder = Path(config.train.out) / CHECKPOINTS
    with building_checkpoint(folder, 0, describe(config, layout, progress)) as building:
        for number, names in enumerate(files):
            read = {f"{MODEL}.{name}": weights.part(name, WHOLE, shapes[name]).float().contiguous() for name in names}
            path = building / f"shard-00001-model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            save_file(read, path, {"format": "pt"})
            if report is not None:
                report(number + 1, len(files))
    return checkpoint_path(folder, 0)


def _in_files(items: Sequence[_T], sizes: Sequence[int], file_bytes: int) -> list[list[_T]]:
    """Divide items of given bytes, in their order, into as few runs as fit.

    >>> _in_files("abcd", [4, 3, 9, 1], 8)
    [['a', 'b'], ['c'], ['d']]
    """
    files: list[list[_T]] = [[]]
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return files


def _read(tensor: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    values = read_tensor(tensor)
    narrow = values.to(dtype)
    if bool(torch.isinf(narrow).any()) and not bool(torch.isinf(values).any()):
        raise ConfigError(f"{tensor.name} has values that {dtype} does not hold; write it as bf16 or fp32")
    return narrow
