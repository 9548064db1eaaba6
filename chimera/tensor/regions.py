"""Entering and leaving tensor-parallel and sequence-parallel regions, each with its conjugate in the backward.

Inside a tensor-parallel region each rank computes its part of a layer from the whole input; inside a sequence-parallel
region it computes the whole layer for its part of the sequence (dim 1). The names are Megatron's; what f, f̄, g and ḡ
do stands in Shoeybi et al. 2019, section 3, and Korthikanti et al. 2022, section 4.2. On a rank of its own all of them
are the identity. Knows no layer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from chimera.tensor.parallel import TensorParallel

__all__ = [
    "copy_to_tensor_region",
    "gather_from_sequence_region",
    "reduce_from_tensor_region",
    "reduce_scatter_to_sequence_region",
    "scatter_to_sequence_region",
]

_SEQUENCE = 1


def copy_to_tensor_region(whole: Tensor, parallel: TensorParallel) -> Tensor:
    """Hand ``whole`` on; its gradient is the sum of the ranks'."""
    return _apply(_Copy, whole, parallel)


def reduce_from_tensor_region(summand: Tensor, parallel: TensorParallel) -> Tensor:
    """Return the sum of the ranks' summands; each gets the sum's gradient."""
    return _apply(_Reduce, summand, parallel)


def reduce_scatter_to_sequence_region(summand: Tensor, parallel: TensorParallel) -> Tensor:
    """Return this rank's part of the sum ``[b, s, …]``, ``[b, s/t, …]``; the gradient is gathered.

    Raises:
        UsageError: t does not divide s.
    """
    return _apply(_ReduceScatter, summand, parallel)


def scatter_to_sequence_region(whole: Tensor, parallel: TensorParallel) -> Tensor:
    """Return this rank's part ``[b, s/t, …]`` of what all of them have; the gradient is gathered.

    Where the sequence is not divided, that is all of it.

    Raises:
        UsageError: t does not divide s.
    """
    return _apply(_Scatter, whole, parallel) if parallel.divides_sequence else whole


def gather_from_sequence_region(part: Tensor, parallel: TensorParallel) -> Tensor:
    """Return the whole sequence, for computations that all ranks do alike; each keeps its part of the gradient.

    Where the sequence is not divided, there is nothing to do. Where ranks compute different parts of a layer from it,
    ``ColumnParallelLinear`` gathers by itself.
    """
    return _apply(_Gather, part, parallel) if parallel.divides_sequence else part


def _apply(function: Any, tensor: Tensor, parallel: TensorParallel) -> Tensor:
    if parallel.size == 1:
        return tensor
    result: Tensor = _untraced(function, tensor, parallel)
    return result


# Collectives of our own communicators are nothing a compiler could trace.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced(function: Any, tensor: Tensor, parallel: TensorParallel) -> Any:
    return function.apply(tensor, parallel)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.start_sum(gradient).wait(), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, summand: Tensor, parallel: TensorParallel) -> Tensor:
        return parallel.start_sum(summand).wait()

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.start_scatter(summand, _SEQUENCE).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.start_gather(gradient, _SEQUENCE).wait(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.part(whole, _SEQUENCE).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.start_gather(gradient, _SEQUENCE).wait(), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.start_gather(part, _SEQUENCE).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.part(gradient, _SEQUENCE).contiguous(), None
