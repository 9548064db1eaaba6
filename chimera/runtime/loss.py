"""What a loss is to the runtime: named terms, each a (sum, count), and their total Σ sum / count.

Counts run over all micro-batches, accumulation runs and data-parallel ranks of a step. They are functions of the
labels, so they are known before the first backward, and each backward is seeded with 1 / count: nothing is rescaled
afterwards.
A plain mean is one term whose count is the samples of the micro-batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from chimera.errors import UsageError

__all__ = ["MEAN", "Counts", "LossFunction", "Terms", "count_terms", "loss_terms", "num_samples"]

MEAN = "loss"
"""The name of the single term that a loss returned as a plain mean makes."""

LossFunction = Callable[[Any, Any], Any]
Counts = dict[str, float]
Terms = dict[str, tuple[torch.Tensor, float]]


def num_samples(batch: Any) -> int:
    """Return the length along dim 0 of a tensor, or of the first tensor of named fields."""
    tensor = next(iter(batch.values())) if isinstance(batch, Mapping) else batch
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
        raise UsageError(
            f"got {type(tensor).__name__} where samples are counted; needed: a tensor, or a mapping of names to "
            "tensors, with the samples along dim 0"
        )
    return int(tensor.shape[0])


def loss_terms(loss_fn: LossFunction, output: Any, target: Any) -> Terms:
    """Evaluate ``loss_fn`` and return its terms; a mean is multiplied out to the sum over its samples."""
    value = loss_fn(output, target)
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise UsageError(
                f"loss_fn returned a tensor of shape {tuple(value.shape)}; needed: a mean (no dimensions), or terms as "
                "{name: (sum, count)}"
            )
        count = num_samples(target)
        return {MEAN: (value * count, float(count))}
    try:
        return {name: (total, float(count)) for name, (total, count) in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"loss_fn returned {type(value).__name__}; needed: a mean (a tensor without dimensions), or terms as "
            "{name: (sum, count)}"
        ) from error


def count_terms(loss_fn: LossFunction, output: Any, target: Any) -> Counts:
    """Return the counts of ``loss_fn`` for one micro-batch, before its forward has run.

    ``loss_fn.counts(target)`` answers where it exists. Otherwise the loss is evaluated on ``output``, which only needs
    the right shape: counts do not depend on its values.
    """
    own = getattr(loss_fn, "counts", None)
    if own is not None:
        return {name: float(count) for name, count in own(target).items()}
    with torch.no_grad():
        return {name: count for name, (_, count) in loss_terms(loss_fn, output, target).items()}
