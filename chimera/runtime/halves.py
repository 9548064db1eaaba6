"""The forward and the backward of one micro-batch through one stage, each piece by piece.

A piece is a run of layers with a graph of its own; between two pieces tensors are cut off, and the backward carries the
gradients over. Mostly a stage is one piece. Layers that can run a forward and a backward together (``runtime.overlap``)
are pieces by themselves, so that either half can stop there. Losses, messages and schedules are none of its business.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from chimera.runtime.channels import Tensors
from chimera.tensor.randomness import Keys

__all__ = ["BackwardHalf", "CallsLayer", "ForwardHalf", "Piece", "RunsLayers", "floating"]

CallsLayer = Callable[[nn.Module, Tensors, Mapping[str, torch.Tensor]], Any]
"""Runs a layer on tensors and named fields in its own way, and gives what the layer would have given."""


class RunsLayers(Protocol):
    """What the halves need of their stage.

    Attributes:
        layers: in order.
        first_layer: the global number of the first one.
        pieces: runs of offsets into ``layers``. An empty one stands behind a last layer that is a piece by itself, so
            that the loss, too, has a graph of its own.
    """

    layers: tuple[nn.Module, ...]
    first_layer: int
    pieces: tuple[range, ...]

    def run(self, tensors: Tensors, batch: Any, keys: Keys | None, offsets: range | None = None) -> Tensors:
        """Run the layers at ``offsets``, each under its random key."""
        ...

    def call(
        self, offset: int, tensors: Tensors, batch: Any, keys: Keys | None, by: CallsLayer | None = None
    ) -> Tensors:
        """Run the layer at ``offset`` under its random key, ``by`` something else than a plain call of it."""
        ...


class Piece(NamedTuple):
    """A piece that has run: its graph lies between inputs and outputs; without outputs it is still to be made again."""

    offsets: range
    inputs: Tensors
    outputs: Tensors | None


class ForwardHalf:
    """A forward under way.

    Args:
        stage: whose layers run.
        inputs: what the stage before gave.
        batch: the micro-batch, whose fields layers may ask for.
        keys: its random keys.
        graph: whether to keep what a backward needs; otherwise only the inputs of each piece are kept, to run it again.

    Attributes:
        inputs, batch, keys: as given: what it takes to run it again.
        outputs: what the last piece gave.
        pieces: those that have run.
    """

    def __init__(self, stage: RunsLayers, inputs: Tensors, batch: Any, keys: Keys | None, *, graph: bool) -> None:
        self.stage = stage
        self.inputs = inputs
        self.batch = batch
        self.keys = keys
        self.outputs = inputs
        self.pieces: list[Piece] = []
        self._graph = graph
        self._left = deque(stage.pieces)
        if graph:
            for tensor in floating(inputs):
                tensor.requires_grad_()

    @property
    def next_piece(self) -> range | None:
        """The offsets of the layers of the next piece, None at the end."""
        return self._left[0] if self._left else None

    def run_piece(self) -> None:
        """Run the next piece."""
        inputs = self._inputs_of_piece()
        with torch.set_grad_enabled(self._graph):
            self._end_piece(inputs, self.stage.run(inputs, self.batch, self.keys, self._left[0]))

    def run_layer(self, by: CallsLayer) -> None:
        """Run the next piece, which is a single layer, ``by`` something else than a plain call of it."""
        inputs = self._inputs_of_piece()
        (offset,) = self._left[0]
        with torch.set_grad_enabled(self._graph):
            self._end_piece(inputs, self.stage.call(offset, inputs, self.batch, self.keys, by))

    def finish(self) -> Tensors:
        """Run all that is left and return the stage's outputs."""
        while self._left:
            self.run_piece()
        outputs = self.outputs
        if not self._graph:
            # It will be run again from its inputs; nobody else needs these here.
            self.outputs = ()
        return outputs

    def remade(self, piece: Piece) -> Piece:
        """Return ``piece`` with its graph, run again where only its inputs were kept."""
        if piece.outputs is not None:
            return piece
        for tensor in floating(piece.inputs):
            tensor.requires_grad_()
        with torch.enable_grad():
            return piece._replace(outputs=self.stage.run(piece.inputs, self.batch, self.keys, piece.offsets))

    def remake_last_piece(self) -> Tensors:
        """Give the last piece its graph, and return its outputs."""
        last = self.pieces[-1] = self.remade(self.pieces[-1])
        assert last.outputs is not None, "it has been made"
        return last.outputs

    def _inputs_of_piece(self) -> Tensors:
        if not self._graph:
            # Each piece has leaves of its own, also where a layer hands a tensor through.
            return tuple(tensor.detach() for tensor in self.outputs)
        return tuple(map(_cut, self.outputs)) if self.pieces else self.outputs

    def _end_piece(self, inputs: Tensors, outputs: Tensors) -> None:
        self.pieces.append(Piece(self._left.popleft(), inputs, outputs if self._graph else None))
        self.outputs = outputs


class BackwardHalf:
    """A backward under way: what is done of its graphs is let go.

    Args:
        forward: the forward it belongs to, run with its graph.
        roots: where the backward starts: the outputs, or loss terms made of them.
        seeds: the gradient of each root.

    Attributes:
        roots, seeds: where the next piece starts; only what has a gradient to send back.
    """

    def __init__(self, forward: ForwardHalf, roots: Tensors, seeds: Tensors) -> None:
        self.stage = forward.stage
        self._forward = forward
        self._left = forward.pieces
        self._gradients: Tensors = ()
        self._start_from(roots, seeds)

    @property
    def next_piece(self) -> range | None:
        """The offsets of the layers of the next piece, None at the end."""
        return self._left[-1].offsets if self._left else None

    def run_piece(self) -> None:
        """Send the gradients back through the next piece; its parameters accumulate."""
        if self.roots:
            torch.autograd.backward(self.roots, self.seeds)
        self.end_piece()

    def end_piece(self) -> None:
        """Go on to the next piece, the gradients of this one's inputs being there."""
        gradients = _gradients_of(self._left.pop().inputs)
        if self._left:
            self._start_from(floating(self._forward.remake_last_piece()), gradients)
        else:
            self._start_from((), ())
            self._gradients = gradients

    def finish(self) -> Tensors:
        """Run all that is left and return the gradients of the stage's floating inputs."""
        while self._left:
            self.run_piece()
        return self._gradients

    def _start_from(self, roots: Tensors, seeds: Tensors) -> None:
        live = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root.requires_grad]
        self.roots: Tensors = tuple(root for root, _ in live)
        self.seeds: Tensors = tuple(seed for _, seed in live)


def floating(tensors: Tensors) -> Tensors:
    """Return the tensors for which a gradient comes back."""
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())


def _gradients_of(tensors: Tensors) -> Tensors:
    """Return the gradients of the floating ones, zeros where none came."""
    return tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in floating(tensors))


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as the start of a new graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
