"""Rows of a table by number, whose gradient goes straight to where gradients are summed.

A micro-batch reads a few rows of a table of words, but autograd makes its gradient as large as the table, mostly zeros,
and then adds that to the sum: for 50,257 words of width 768 some 300 MB written and read for half a megabyte of
numbers. Here the rows that were read are added where they belong. Knows neither words nor stages.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from chimera.tensor.gradient_buffer import gradient_dtype
from chimera.tensor.linear import WeightProducts

__all__ = ["looked_up"]


def looked_up(numbers: Tensor, table: Tensor, products: WeightProducts | None) -> Tensor:
    """Return the rows of ``table`` at ``numbers``, ``[…, width]``.

    Args:
        numbers: ``[…]``.
        table: ``[rows, width]``.
        products: of the runtime that sums gradients; None leaves all to autograd.

    Raises:
        IndexError: a number that is no row (on the CPU; a failed assertion of the device on others).
    """
    if products is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return functional.embedding(numbers, table)
    rows: Tensor = _LookUp.apply(numbers, table, products)  # type: ignore[no-untyped-call]
    return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, table: Tensor, products: WeightProducts) -> Tensor:
        ctx.save_for_backward(numbers, table)
        ctx.products = products
        return functional.embedding(numbers, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        numbers, table = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None
        into, whole = table.grad, None
        if ctx.products.completed is not None:
            # Autograd tells when the last use of a table has had its backward; a look-up knows its own alone.
            into = whole = torch.zeros_like(table, dtype=gradient_dtype(table))
        elif into is None:
            into = table.grad = torch.zeros_like(table)
        # Unlike index_add_, this sums in the same order every time on a GPU too.
        into.index_put_((numbers.flatten(),), gradient.flatten(0, -2).to(into.dtype), accumulate=True)
        return None, whole, None
