"""A linear layer whose weight gradient can wait: the product is queued in the backward and made later, at ``W``.

Splitting a backward into the gradient of the input (``I``) and that of the weights (``W``) lets a schedule fill bubbles
with the latter (Qi et al., Zero Bubble, ICLR'24, section 2). Only the product of a linear layer's weight is worth
queueing; everything else is computed where autograd does. Knows neither stages nor schedules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["DefersWeights", "Linear", "WeightProduct", "WeightProducts", "WeightWork"]


class WeightWork(Protocol):
    """Work of a backward that can wait until ``W``."""

    @property
    def weight(self) -> nn.Parameter:
        """The weight to whose gradient it adds."""

    def add(self) -> None:
        """Do it, and add what it gives to the weights' gradients."""


class WeightProduct(NamedTuple):
    """gradientᵀ · inputs, to be added to ``weight.grad``; both flattened to ``[tokens, features]``."""

    weight: nn.Parameter
    inputs: torch.Tensor
    gradient: torch.Tensor

    @torch.no_grad()
    def add(self) -> None:
        """Make the product and add it."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        if self.weight.grad.dtype is self.gradient.dtype:
            self.weight.grad.addmm_(self.gradient.T, self.inputs)
        else:
            self.weight.grad += self.gradient.T @ self.inputs


class WeightProducts:
    """Where the layers of a stage put their products while a backward is split; otherwise they make them at once.

    Attributes:
        completed: called with a weight whose gradient is complete without autograd's adding it; None asks for no call.
    """

    def __init__(self) -> None:
        self._queue: list[WeightWork] | None = None
        self.completed: Callable[[nn.Parameter], None] | None = None

    @property
    def waits(self) -> bool:
        """Whether products are being queued."""
        return self._queue is not None

    def queue(self, work: WeightWork) -> None:
        """Keep a product for later."""
        assert self._queue is not None, "products are queued inside queued() alone"
        self._queue.append(work)

    @contextmanager
    def queued(self) -> Iterator[list[WeightWork]]:
        """Queue the products of the backward inside the block, and give them."""
        assert self._queue is None, "one backward at a time"
        self._queue = []
        try:
            yield self._queue
        finally:
            self._queue = None

    def serve(self, layers: Sequence[nn.Module]) -> None:
        """Have every module in ``layers`` whose weight gradient can wait put its products here."""
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, DefersWeights):
                    module.products = self


class DefersWeights:
    """Base of modules whose weight gradient can wait.

    Attributes:
        products: where to put it; None where no schedule splits its backward.
    """

    products: WeightProducts | None = None


class Linear(nn.Linear, DefersWeights):
    """``nn.Linear`` whose weight gradient can wait; without ``products`` it computes as that does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear names it
        """Return ``input`` · weightᵀ + bias."""
        if self.products is None or not torch.is_grad_enabled():
            return functional.linear(input, self.weight, self.bias)
        waiting: torch.Tensor = _waiting_linear(input, self.weight, self.bias, self.products)
        return waiting


# A compiler would trace the queue as if it were part of the model.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _waiting_linear(
    inputs: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, products: WeightProducts
) -> torch.Tensor:
    output: torch.Tensor = _WaitingLinear.apply(inputs, weight, bias, products)  # type: ignore[no-untyped-call]
    return output


class _WaitingLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, products: WeightProducts
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.products = products
        return functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad[:3]
        flat = gradient.reshape(-1, gradient.shape[-1])
        weight_gradient = None
        if of_weight:
            rows = inputs.reshape(-1, inputs.shape[-1])
            if ctx.products.waits:
                ctx.products.queue(WeightProduct(weight, rows, flat))
            else:
                weight_gradient = flat.T @ rows
        return (
            gradient @ weight if of_inputs else None,
            weight_gradient,
            flat.sum(0) if of_bias else None,
            None,
        )
