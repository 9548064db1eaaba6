"""A checkpoint's weights as transformers' files, one after another, so that the model need not fit into memory."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import torch

from chimera.errors import CheckpointError, ConfigError
from chimera.models.config import TransformerConfig
from chimera.models.huggingface import finish_huggingface, write_huggingface
from chimera.train.checkpoint import Checkpoint
from chimera.train.state import MODEL
from chimera.train.stored import StoredTensor, config_of, faults, read_tensor, stored_tensors

__all__ = ["EXPORT_TYPES", "export_checkpoint"]

EXPORT_TYPES: Final[Mapping[str, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


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
    files = _in_files(weights, file_bytes, torch.empty((), dtype=dtype).element_size())
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


def _in_files(tensors: Iterable[StoredTensor], file_bytes: int, item_bytes: int) -> list[list[StoredTensor]]:
    """Divide tensors, in their order, into as few runs as fit."""
    files: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = tensor.num_elements * item_bytes
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += size
    return files


def _read(tensor: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    values = read_tensor(tensor)
    narrow = values.to(dtype)
    if bool(torch.isinf(narrow).any()) and not bool(torch.isinf(values).any()):
        raise ConfigError(f"{tensor.name} has values that {dtype} does not hold; write it as bf16 or fp32")
    return narrow
