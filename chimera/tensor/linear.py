"""Linear layers whose weight gradient can wait, and goes straight to where gradients are summed.

Splitting a backward into the gradient of the input (``I``) and that of the weights (``W``) lets a schedule fill bubbles
with the latter (Qi et al., Zero Bubble, ICLR'24, section 2). Only the product of a linear layer's weight is worth
queueing; everything else is computed where autograd does. Where tensor-parallel ranks share the layer's input, the
exchange of its gradient runs beside that product. Knows neither stages nor schedules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from chimera.tensor.float8 import Float8Products
from chimera.tensor.parallel import ALONE, Collective, TensorParallel

__all__ = ["DefersWeights", "Linear", "WeightProduct", "WeightProducts", "WeightWork", "shared_linear", "started_ahead"]

_SEQUENCE = 1


class WeightWork(Protocol):
    """Work of a backward that can wait until ``W``."""

    @property
    def weight(self) -> nn.Parameter:
        """The weight to whose gradient it adds."""

    def start(self) -> None:
        """Begin to fetch what the work needs from other ranks, if anything; a second call does nothing."""

    def add(self) -> None:
        """Do it, and add what it gives to the weights' gradients."""


def started_ahead(works: Sequence[WeightWork]) -> Iterator[WeightWork]:
    """Yield the works in order, each with the next one started, so that this fetches while the one before computes."""
    for number, work in enumerate(works):
        work.start()
        if number + 1 < len(works):
            works[number + 1].start()
        yield work


class WeightProduct:
    """gradientᵀ · inputs, to be added to ``weight.grad``.

    Args:
        weight: ``[out, in]``.
        inputs: ``[…, in]``, or this rank's part of them along the sequence, which is then gathered when needed.
        gradient: ``[…, out]``, of the layer's output.
        parallel: the ranks that divide the inputs; ``ALONE`` where nobody does.
        float8: what makes the product where it is in float8.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        inputs: Tensor,
        gradient: Tensor,
        parallel: TensorParallel,
        float8: Float8Products | None = None,
    ) -> None:
        self.weight = weight
        self._float8 = float8
        self._inputs = inputs
        self._gradient = gradient
        self._parallel = parallel
        self._gathering: Collective | None = None

    def start(self) -> None:
        """Begin to gather divided inputs."""
        if self._parallel.divides_sequence and self._gathering is None:
            self._gathering = self._parallel.start_gather(self._inputs, _SEQUENCE)

    def value(self) -> Tensor:
        """Return the product, ``[out, in]``."""
        gradient, inputs = self._factors()
        if self._float8 is not None:
            return self._float8.weight_gradient(gradient.T, inputs, gradient.dtype)
        return gradient @ inputs

    @torch.no_grad()
    def add(self) -> None:
        """Make the product and add it."""
        gradient, inputs = self._factors()
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        total = self.weight.grad
        if self._float8 is not None:
            total += self._float8.weight_gradient(gradient.T, inputs, torch.float32)
        elif total.dtype is gradient.dtype:
            total.addmm_(gradient, inputs)
        elif total.is_cuda and total.dtype is torch.float32:
            # The product is accumulated in fp32 anyway, and this way never rounded to the narrower type.
            torch.addmm(total, gradient, inputs, out_dtype=torch.float32, out=total)
        else:
            total += gradient @ inputs

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return ``[out, tokens]`` and ``[tokens, in]``."""
        self.start()
        if self._gathering is not None:
            self._inputs, self._gathering, self._parallel = self._gathering.wait(), None, ALONE
        return self._gradient.flatten(0, -2).T, self._inputs.flatten(0, -2)


class WeightProducts:
    """Where the layers of a stage put their products while a backward is split; otherwise they make them at once.

    Args:
        split: whether backwards are split at all.

    Attributes:
        completed: called with a weight whose gradient is complete without autograd's adding it; None asks for no call.
    """

    def __init__(self, *, split: bool = True) -> None:
        self.split = split
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
    """Base of modules whose weight gradient can wait, or goes past autograd to where gradients are summed.

    Attributes:
        products: where to put it; None where no runtime has asked for it.
    """

    products: WeightProducts | None = None


class Linear(nn.Linear, DefersWeights):
    """``nn.Linear`` whose weight gradient can wait; without ``products`` it computes as that does.

    Attributes:
        float8: the ranks that agree on the scales of products in float8; None multiplies in the layer's own type.
    """

    float8: TensorParallel | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear names it
        """Return ``input`` · weightᵀ + bias."""
        return shared_linear(input, self.weight, self.bias, self.products, ALONE, float8=self.float8)


def shared_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    products: WeightProducts | None,
    parallel: TensorParallel,
    *,
    float8: TensorParallel | None = None,
) -> Tensor:
    """Return ``inputs`` · weightᵀ + bias, where the ranks of ``parallel`` share the inputs.

    Args:
        inputs: ``[…, in]``, the same on every rank; or its part of them, ``[b, s/t, in]``, where they divide the
            sequence.
        weight: ``[out, in]``.
        bias: ``[out]``.
        products: where the weight's gradient may wait; None computes it with the rest.
        parallel: the ranks whose gradients of the inputs make the whole one together; ``ALONE`` for an input that
            only this rank's layer reads.
        float8: the ranks that agree on the scales of products in float8; None multiplies in the inputs' own type.
    """
    if parallel.size == 1 and float8 is None:
        compiling = torch.compiler.is_compiling()
        plain = products is None or (compiling and not products.split)
        if plain or not torch.is_grad_enabled():
            return functional.linear(inputs, weight, bias)
    output: Tensor = _untraced_linear(inputs, weight, bias, products, parallel, float8)
    return output


# A compiler would trace the queue as if it were part of the model.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced_linear(*arguments: Any) -> Any:
    return _Linear.apply(*arguments)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: WeightProducts | None,
        parallel: TensorParallel,
        float8: TensorParallel | None,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.products, ctx.parallel = products, parallel
        ctx.float8 = None if float8 is None else Float8Products(float8)
        whole = parallel.start_gather(inputs, _SEQUENCE).wait() if parallel.divides_sequence else inputs
        if ctx.float8 is None:
            return functional.linear(whole, weight, bias)
        output: Tensor = ctx.float8.output(whole, weight)
        return output if bias is None else output + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        products, parallel, float8 = ctx.products, ctx.parallel, ctx.float8
        of_inputs, of_weight, of_bias = ctx.needs_input_grad[:3]
        if float8 is not None:
            # Before any other exchange, behind which it would wait.
            float8.begin_backward(gradient)
        work = WeightProduct(weight, inputs, gradient, parallel, float8) if of_weight else None
        waits = work is not None and products is not None and products.waits
        if work is not None and not waits:
            work.start()  # fetches beside the product below
        exchange = None
        if of_inputs:
            product = gradient @ weight if float8 is None else float8.input_gradient(gradient, weight)
            exchange = _exchange(product, parallel)
        # What follows runs beside the exchange.
        bias_gradient = gradient.flatten(0, -2).sum(0) if of_bias else None
        weight_gradient = None
        if work is not None:
            if waits:
                products.queue(work)
            elif products is not None and products.completed is None:
                work.add()
            else:
                # Autograd tells when the last use of a weight has had its backward; the layer knows its own alone.
                weight_gradient = work.value()
        input_gradient = exchange.wait() if isinstance(exchange, Collective) else exchange
        return input_gradient, weight_gradient, bias_gradient, None, None, None


def _exchange(gradient: Tensor, parallel: TensorParallel) -> Tensor | Collective:
    """Start making the whole gradient of shared inputs out of the ranks' own, or return it where there is one rank."""
    if parallel.size == 1:
        return gradient
    if parallel.divides_sequence:
        return parallel.start_scatter(gradient, _SEQUENCE)
    return parallel.start_sum(gradient, into=True)
