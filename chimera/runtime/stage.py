"""One stage of the model on one rank: forward and backward of one micro-batch, all kept or some recomputed.

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
from chimera.runtime.halves import BackwardHalf, CallsLayer, ForwardHalf
from chimera.runtime.overlap import pieces_of
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
        overlapped: whether the schedule pairs this stage's forwards or backwards with another's, and their layers have
            a form of their own for that.

    Attributes:
        layers, first_layer: as given.
        pieces: runs of offsets into ``layers`` between which its forward and its backward can stop.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        *,
        recompute_every: int | None = None,
        split_backward: bool = False,
        overlapped: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.first_layer = first_layer
        self._recomputes = recompute_every is not None
        # A piece with a form of its own is made again with all others, so that it can run beside another stage's.
        self._all_at_once = overlapped
        self.pieces = pieces_of(self.layers) if overlapped else _runs(len(self.layers), recompute_every)
        # The names of the micro-batch fields a layer asks for; None where it takes the batch itself.
        self._fields = tuple(getattr(layer, "fields", ()) for layer in layers)
        self._saved: dict[int, ForwardHalf] = {}
        self._products = WeightProducts(split=split_backward)
        self._products.serve(layers)
        self._waiting: dict[int, list[WeightWork]] = {}

    # Whole actions

    def forward(self, microbatch: int, inputs: Tensors, batch: Any, keys: Keys | None) -> Tensors:
        """Run the layers on ``inputs`` and keep what ``backward`` needs."""
        return self.begin_forward(microbatch, inputs, batch, keys).finish()

    def outputs_for_backward(self, microbatch: int) -> Tensors:
        """Return the outputs whose graph ``backward`` will use, running the last piece again under recompute."""
        saved = self._saved[microbatch]
        if not self._recomputes:
            return saved.outputs
        if not self._all_at_once:
            return saved.remake_last_piece()
        again = self._saved[microbatch] = ForwardHalf(self, saved.inputs, saved.batch, saved.keys, graph=True)
        return again.finish()

    def backward(self, microbatch: int, roots: Tensors, seeds: Tensors) -> Tensors:
        """Send ``seeds`` back from ``roots``; parameters accumulate, the floating inputs' gradients are returned."""
        return self.begin_backward(microbatch, roots, seeds).finish()

    def input_gradient(self, microbatch: int, roots: Tensors, seeds: Tensors) -> Tensors:
        """Do what ``backward`` does, but leave the products of weight gradients to ``weight_gradient``."""
        with self.deferring(microbatch):
            return self.backward(microbatch, roots, seeds)

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

    # The same, to be run piece by piece

    def begin_forward(self, microbatch: int, inputs: Tensors, batch: Any, keys: Keys | None) -> ForwardHalf:
        """Return the forward of a micro-batch, of which nothing has run yet."""
        begun = self._saved[microbatch] = ForwardHalf(self, inputs, batch, keys, graph=not self._recomputes)
        return begun

    def begin_backward(self, microbatch: int, roots: Tensors, seeds: Tensors) -> BackwardHalf:
        """Return the backward from what ``outputs_for_backward`` gave, of which nothing has run yet."""
        return BackwardHalf(self._saved.pop(microbatch), roots, seeds)

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Leave the products of weight gradients to ``weight_gradient`` while inside."""
        with self._products.queued() as queue:
            yield
        self._waiting[microbatch] = queue

    # Layers

    def run(self, tensors: Tensors, batch: Any, keys: Keys | None, offsets: range | None = None) -> Tensors:
        """Run the layers at ``offsets``, or all, each under its own random key; None leaves the generators alone."""
        for offset in range(len(self.layers)) if offsets is None else offsets:
            tensors = self.call(offset, tensors, batch, keys)
        return tensors

    def call(
        self, offset: int, tensors: Tensors, batch: Any, keys: Keys | None, by: CallsLayer | None = None
    ) -> Tensors:
        """Run the layer at ``offset`` under its own random key, ``by`` something else than a plain call of it."""
        layer, fields, number = self.layers[offset], self._fields[offset], self.first_layer + offset
        if keys is not None:
            keys.layer(number)
        if number == 0:
            tensors = self._model_inputs(batch)
        named = self._named(batch, fields, number) if fields else {}
        return as_tensors(layer(*tensors, **named) if by is None else by(layer, tensors, named), number)

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


def _runs(count: int, every: int | None) -> tuple[range, ...]:
    """Return runs of ``every`` offsets below ``count``, the last one maybe shorter; all in one for None."""
    length = max(1, count if every is None else every)
    return tuple(range(start, min(start + length, count)) for start in range(0, count, length)) or (range(0),)
