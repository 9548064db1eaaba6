"""One stage of the model on one rank: forward and backward of one micro-batch, all kept or some recomputed.

A stage runs its layers under their random keys, keeps what the backward needs, and gives the gradients of its inputs.
It knows neither peers nor schedules; parameters accumulate into whatever their ``grad`` points at.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chimera.errors import UsageError
from chimera.runtime.channels import Spec, Tensors, TensorSpec
from chimera.tensor.linear import WeightProducts, WeightWork, started_ahead
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


@dataclass(slots=True)
class _Forward:
    """What the forward of one micro-batch left for its backward.

    Attributes:
        inputs: of each segment whose graph is still to be made or used, the last one's at the end.
        outputs: of the last segment, with their graph; none under recompute, until the backward begins.
        batch, keys: of the micro-batch, to run a segment again.
    """

    inputs: list[Tensors]
    outputs: Tensors
    batch: Any
    keys: Keys | None


class Stage:
    """Layers ``first_layer``… of the model.

    Args:
        layers: this stage's layers, in order.
        first_layer: the global number of the first one.
        recompute_every: keep only the inputs of every so many layers in the forward, and run these again in the
            backward, one such segment at a time; None keeps everything.
        split_backward: whether the schedule has I and W in place of B: linear layers of ours then leave the products
            of their weights' gradients to W. What other modules compute is all computed at I, and W adds nothing: to
            keep their graph for a second pass would cost more than it moves.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        *,
        recompute_every: int | None = None,
        split_backward: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self._recomputes = recompute_every is not None
        every = recompute_every or len(layers)
        self._segments = [range(start, min(start + every, len(layers))) for start in range(0, len(layers), every)]
        # The names of the micro-batch fields a layer asks for; None where it takes the batch itself.
        self._fields = tuple(getattr(layer, "fields", ()) for layer in layers)
        self._saved: dict[int, _Forward] = {}
        self._products = WeightProducts(split=split_backward)
        self._products.serve(layers)
        self._waiting: dict[int, list[WeightWork]] = {}

    def forward(self, microbatch: int, inputs: Tensors, batch: Any, keys: Keys | None) -> Tensors:
        """Run the layers on ``inputs`` and keep what ``backward`` needs."""
        if not self._recomputes:
            outputs = self._run_with_graph(self._segments[0], inputs, batch, keys)
            self._saved[microbatch] = _Forward([inputs], outputs, None, None)
            return outputs
        boundaries = []
        tensors = inputs
        with torch.no_grad():
            for segment in self._segments:
                # Each its own leaf, also where a layer hands a tensor through.
                tensors = tuple(tensor.detach() for tensor in tensors)
                boundaries.append(tensors)
                tensors = self._run(segment, tensors, batch, keys)
        self._saved[microbatch] = _Forward(boundaries, (), batch, keys)
        return tensors

    def outputs_for_backward(self, microbatch: int) -> Tensors:
        """Return the outputs whose graph ``backward`` will use, running the last segment again under recompute."""
        saved = self._saved[microbatch]
        if self._recomputes:
            saved.outputs = self._run_with_graph(self._segments[-1], saved.inputs[-1], saved.batch, saved.keys)
        return saved.outputs

    def backward(self, microbatch: int, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> Tensors:
        """Send ``seeds`` back from ``roots``; parameters accumulate, the floating inputs' gradients are returned."""
        saved = self._saved.pop(microbatch)
        saved.outputs = ()
        gradients = _send_back(saved.inputs.pop(), roots, seeds)
        while saved.inputs:
            segment, inputs = self._segments[len(saved.inputs) - 1], saved.inputs.pop()
            outputs = self._run_with_graph(segment, inputs, saved.batch, saved.keys)
            gradients = _send_back(inputs, [tensor for tensor in outputs if tensor.is_floating_point()], gradients)
        return gradients

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
        for product in started_ahead(queue):
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
        return self._run(range(len(self.layers)), tensors, batch, keys)

    def _run_with_graph(self, segment: range, inputs: Tensors, batch: Any, keys: Keys | None) -> Tensors:
        """Run some layers on what becomes the graph's leaves."""
        for tensor in inputs:
            if tensor.is_floating_point():
                tensor.requires_grad_()
        return self._run(segment, inputs, batch, keys)

    def _run(self, segment: range, tensors: Tensors, batch: Any, keys: Keys | None) -> Tensors:
        for offset in segment:
            layer, fields, number = self.layers[offset], self._fields[offset], self.first_layer + offset
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


def _send_back(inputs: Tensors, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> Tensors:
    """Send ``seeds`` back from ``roots`` and return the gradients of the floating ``inputs``."""
    live = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root.requires_grad]
    if live:
        torch.autograd.backward([root for root, _ in live], [seed for _, seed in live])
    return tuple(
        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for tensor in inputs
        if tensor.is_floating_point()
    )
