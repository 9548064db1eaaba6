"""Cut a batch into micro-batches, and tell which of them look alike.

A batch is a tensor, a mapping of names to tensors, or a list that already holds one of these per micro-batch (the way
to give micro-batches of different lengths). Nothing is padded, dropped or repeated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chimera.errors import UsageError
from chimera.runtime.loss import num_samples

__all__ = ["Signature", "cut", "cut_both", "signature", "to_device"]

Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def cut(batch: Any, num_microbatches: int, what: str) -> list[Any]:
    """Cut ``batch`` along dim 0 into ``num_microbatches``, the first ones a sample longer where it does not divide.

    Raises:
        UsageError: fewer samples than micro-batches, or a list of another length.
    """
    if isinstance(batch, Sequence):
        if len(batch) != num_microbatches:
            raise UsageError(
                f"{what}: got a list of {len(batch)} micro-batches; the schedule runs {num_microbatches}; "
                "build it for that number, or pass one tensor to be cut"
            )
        return list(batch)
    samples = num_samples(batch)
    if samples < num_microbatches:
        raise UsageError(
            f"{what}: got {samples} samples for {num_microbatches} micro-batches; needed: at least one sample each; "
            "take a larger batch or a schedule with fewer micro-batches"
        )
    if isinstance(batch, Mapping):
        pieces = {name: _split(name, tensor, samples, num_microbatches, what) for name, tensor in batch.items()}
        return [{name: piece[i] for name, piece in pieces.items()} for i in range(num_microbatches)]
    return list(batch.tensor_split(num_microbatches))


def cut_both(inputs: Any, targets: Any, num_microbatches: int, device: torch.device) -> tuple[list[Any], list[Any]]:
    """Cut a batch's inputs and targets alike, and move the micro-batches to where the model lives.

    Raises:
        UsageError: they cannot be cut, or have different numbers of samples.
    """
    given_whole = not (isinstance(inputs, Sequence) or isinstance(targets, Sequence))
    if given_whole and num_samples(inputs) != num_samples(targets):
        raise UsageError(
            f"inputs have {num_samples(inputs)} samples along dim 0, targets {num_samples(targets)}; needed: as "
            "many, since both are cut alike; or lists with one entry per micro-batch"
        )
    batches, goals = cut(inputs, num_microbatches, "inputs"), cut(targets, num_microbatches, "targets")
    return [to_device(batch, device) for batch in batches], [to_device(goal, device) for goal in goals]


def _split(name: str, tensor: torch.Tensor, samples: int, parts: int, what: str) -> tuple[torch.Tensor, ...]:
    if num_samples(tensor) != samples:
        raise UsageError(
            f"{what}: field {name!r} has {num_samples(tensor)} samples along dim 0, the first field has {samples}; "
            "all fields of a batch hold the same samples"
        )
    return tensor.tensor_split(parts)


def signature(microbatch: Any) -> Signature:
    """Return names, shapes and types: micro-batches with equal signatures make messages of equal shapes."""
    if isinstance(microbatch, torch.Tensor):
        return (("", microbatch.shape, microbatch.dtype),)
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in microbatch.items())


def to_device(microbatch: Any, device: torch.device) -> Any:
    """Move a micro-batch to where the model lives."""
    if isinstance(microbatch, torch.Tensor):
        return microbatch if microbatch.device == device else microbatch.to(device, non_blocking=True)
    if not isinstance(microbatch, Mapping):
        raise UsageError(
            f"a micro-batch is of type {type(microbatch).__name__}; needed: a tensor, or a mapping of names to tensors"
        )
    return {name: to_device(tensor, device) for name, tensor in microbatch.items()}
