"""One stage of the model on one rank: forward and backward of one micro-batch, with or without recompute.

A stage runs its layers under their random keys, keeps what the backward needs, and gives the gradients of its inputs.
It knows neither peers nor schedules; parameters accumulate into whatever their ``grad`` points at.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chimera.errors import UsageError
from chimera.runtime.channels import Spec, Tensors, TensorSpec
from chimera.tensor.linear import WeightProducts, WeightWork
from chimera.tensor.randomness import Keys

__all__ = ["Stage", "as_tensors", "spec_of"]


def as_tensors(value: Any, layer: int) -> Tensors:
    """Return what a layer gave as a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        return (value,)
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"layer {layer} returned {type(tensor).__name__}; needed: a tensor or a tuple of tensors")
    return tensors


def spec_of(tensors: Sequence[torch.Tensor]) -> Spec:
    """Return the shapes and types of ``tensors``."""
    return tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors)


class Stage:
    """Layers ``first_layer``… of the model.

    Args:
        layers: this stage's layers, in order.
        first_layer: the global number of the first one.
        recompute: keep only the stage's inputs in the forward, and run it again in the backward.
        split_backward: whether the schedule has I and W in place of B: linear layers of ours then leave the products
            of their weights' gradients to W. What other modules compute is all computed at I, and W adds nothing: to
            keep their graph for a second pass would cost more than it moves.
    """

    def __init__(
        self, layers: Sequence[nn.Module], first_layer: int, *, recompute: bool = False, split_backward: bool = False
    ) -> None:
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self.recompute = recompute
        # The names of the micro-batch fields a layer asks for; None where it takes the batch itself.
        self._fields = tuple(getattr(layer, "fields", ()) for layer in layers)
        self._saved: dict[int, tuple[Tensors, Tensors, Any, Keys | None]] = {}
        self._products = WeightProducts()
        self._waiting: dict[int, list[WeightWork]] = {}
        if split_backward:
            self._products.serve(layers)

    def forward(self, microbatch: int, inputs: Tensors, batch: Any, keys: Keys | None) -> Tensors:
        """Run the layers on ``inputs`` and keep what ``backward`` needs."""
        if self.recompute:
            with torch.no_grad():
                outputs = self.run(inputs, batch, keys)
            self._saved[microbatch] = (inputs, (), batch, keys)
            return outputs
        for tensor in inputs:
            if tensor.is_floating_point():
                tensor.requires_grad_()
        outputs = self.run(inputs, batch, keys)
        self._saved[microbatch] = (inputs, outputs, None, None)
        return outputs

    def outputs_for_backward(self, microbatch: int) -> Tensors:
        """Return the outputs whose graph ``backward`` will use, running the forward again under recompute."""
        inputs, outputs, batch, keys = self._saved[microbatch]
        if self.recompute:
            for tensor in inputs:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
            outputs = self.run(inputs, batch, keys)
            self._saved[microbatch] = (inputs, outputs, None, None)
        return outputs

    def backward(self, microbatch: int, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> Tensors:
        """Send ``seeds`` back from ``roots``; parameters accumulate, the floating inputs' gradients are returned."""
        inputs = self._saved.pop(microbatch)[0]
        live = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root.requires_grad]
        if live:
            torch.autograd.backward([root for root, _ in live], [seed for _, seed in live])
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in inputs
            if tensor.is_floating_point()
        )

    def input_gradient(self, microbatch: int, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> Tensors:
        """Do what ``backward`` does, but leave the products of weight gradients to ``weight_gradient``."""
        with self._products.queued() as queue:
            gradients = self.backward(microbatch, roots, seeds)
        self._waiting[microbatch] = queue
        return gradients

    def weight_gradient(self, microbatch: int) -> None:
        """Make the products that ``input_gradient`` left, and add them to the gradients."""
        queue = self._waiting.pop(microbatch)
        completed = self._products.completed
        left = Counter(id(product.weight) for product in queue)
        if completed is not None:
            # Whatever else the stage has got its gradient at I.
            for parameter in self._used_once():
                if id(parameter) not in left:
                    completed(parameter)
        for product in queue:
            product.add()
            left[id(product.weight)] -= 1
            if completed is not None and not left[id(product.weight)]:
                completed(product.weight)

    @contextmanager
    def telling(self, completed: Callable[[nn.Parameter], None]) -> Iterator[None]:
        """Call ``completed`` with each parameter whose gradient the backward inside the block completes.

        Inside is a whole backward, or the weights' half, of the last micro-batch that adds to these gradients. A
        parameter that autograd passes by, or that several layers share, is not told of.
        """
        self._products.completed = completed
        hooks = [
            parameter.register_post_accumulate_grad_hook(completed)  # type: ignore[no-untyped-call]
            for parameter in self._used_once()
        ]
        try:
            yield
        finally:
            self._products.completed = None
            for hook in hooks:
                hook.remove()

    def _used_once(self) -> list[nn.Parameter]:
        """Return the parameters that train and that one layer alone has."""
        uses = Counter(id(parameter) for layer in self.layers for parameter in layer.parameters())
        return [p for layer in self.layers for p in layer.parameters() if p.requires_grad and uses[id(p)] == 1]

    def assert_empty(self) -> None:
        """Assert that every forward had its backward."""
        assert not self._saved, f"forwards without a backward: micro-batches {sorted(self._saved)}"
        assert not self._waiting, f"I without W: micro-batches {sorted(self._waiting)}"

    def run(self, tensors: Tensors, batch: Any, keys: Keys | None) -> Tensors:
        """Run the layers, each under its own random key; ``keys`` None leaves the generators alone."""
        for offset, (layer, fields) in enumerate(zip(self.layers, self._fields, strict=True)):
            number = self.first_layer + offset
            if keys is not None:
                keys.layer(number)
            if number == 0:
                tensors = self._model_inputs(batch)
            named = self._named(batch, fields, number) if fields else {}
            tensors = as_tensors(layer(*tensors, **named), number)
        return tensors

    def _model_inputs(self, batch: Any) -> Tensors:
        """Return what the first layer takes by position: the batch, or nothing where it asks for fields."""
        if isinstance(batch, torch.Tensor):
            return (batch,)
        if not self._fields[0]:
            raise UsageError(
                f"inputs are the fields {', '.join(batch)}, but layer 0 names none in its attribute `fields`; "
                "name those it takes there, or pass inputs as one tensor"
            )
        return ()

    def _named(self, batch: Any, fields: Sequence[str], layer: int) -> dict[str, torch.Tensor]:
        if not isinstance(batch, Mapping) or not set(fields) <= set(batch):
            got = f"fields {', '.join(batch)}" if isinstance(batch, Mapping) else f"one {type(batch).__name__}"
            raise UsageError(
                f"layer {layer} takes the fields {', '.join(fields)} of the micro-batch, but the inputs are {got}; "
                "pass inputs as a mapping with those names"
            )
        return {name: batch[name] for name in fields}
