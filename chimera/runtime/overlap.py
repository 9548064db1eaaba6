"""A forward and a backward run together, by the layers' own way of doing so.

A layer's class may offer ``overlapped_forward_backward`` (see ``Overlaps``), which runs the forward of one such layer
and the backward of another as one: kernels of the one while messages of the other are under way. In a pair of the
schedule the layers of the two stages that can do this are matched, the first of the forward with the last of the
other stage, and so on; what stands between them, or is left over, runs a forward piece or a backward piece at a time.
Nothing here knows what such a form does, nor losses and messages.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from chimera.errors import ChimeraError, RunError
from chimera.ir.action import Overlap
from chimera.runtime.channels import Tensors
from chimera.runtime.halves import BackwardHalf, ForwardHalf

__all__ = ["LayerBackward", "LayerForward", "Overlaps", "pieces_of", "run_together", "runs_together"]


class LayerForward(NamedTuple):
    """A forward that is due.

    Attributes:
        layer: to be run.
        inputs: what it takes by position.
        fields: the fields of the micro-batch that it names in its attribute ``fields``.
    """

    layer: Any
    inputs: Tensors
    fields: Mapping[str, torch.Tensor]

    def run(self) -> Any:
        """Run it in one go, and return what it gives."""
        return self.layer(*self.inputs, **self.fields)


class LayerBackward(NamedTuple):
    """A backward that is due.

    Attributes:
        layer: whose backward it is.
        outputs: those tensors the layer gave in its forward that have a gradient to send back; the objects themselves.
        gradients: the gradient of each.
    """

    layer: Any
    outputs: Tensors
    gradients: Tensors

    def run(self) -> None:
        """Run it in one go: parameters accumulate, and so do the inputs that the layer had."""
        torch.autograd.backward(self.outputs, self.gradients)


class Overlaps(Protocol):
    """A layer whose class can run a forward and a backward together."""

    @classmethod
    def overlapped_forward_backward(cls, forward: LayerForward, backward: LayerBackward) -> Any:
        """Run both, in whatever order and on whatever streams, and return what the forward gives.

        Both layers are of this class, their micro-batches different; they may be the same layer. By the end the
        backward has to have done what ``backward.run()`` does. The default generators are seeded for the forward; a
        backward draws nothing.
        """
        ...


_Form = Callable[[LayerForward, LayerBackward], Any]


def _form_of(layer: nn.Module) -> _Form | None:
    form: _Form | None = getattr(type(layer), Overlaps.overlapped_forward_backward.__name__, None)
    return form


def pieces_of(layers: Sequence[nn.Module]) -> tuple[range, ...]:
    """Return the runs of layers between which a stage can stop: each layer with a form of its own is one."""
    numbers = range(len(layers))
    # Layers with a form are told apart by their number, all between them share a key.
    runs = [list(run) for _, run in groupby(numbers, lambda n: n if _form_of(layers[n]) else None)]
    pieces = [range(run[0], run[-1] + 1) for run in runs]
    if layers and _form_of(layers[-1]):
        pieces.append(range(len(layers), len(layers)))
    return tuple(pieces)


def runs_together(forward: Sequence[nn.Module], backward: Sequence[nn.Module]) -> bool:
    """Return whether a pair of these two stages has two layers that meet and run together."""
    return any(type(f) is type(b) for f, b in zip(_with_form(forward), _with_form(backward)[::-1], strict=False))


def _with_form(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return [layer for layer in layers if _form_of(layer)]


def run_together(forward: ForwardHalf, backward: BackwardHalf, pair: Overlap) -> tuple[Tensors, Tensors]:
    """Run both halves to their ends; return the forward's outputs and the gradients of the backward's inputs.

    Raises:
        RunError: a layer's form failed, or returned before the gradients were sent back; it names pair and layers.
    """
    while (ahead := _next_with_form(forward)) is not None and (back := _next_with_form(backward)) is not None:
        # Layers of different classes do not know each other; without a root there is nothing to send back.
        if type(forward.stage.layers[ahead]) is type(backward.stage.layers[back]) and backward.roots:
            _run_both(forward, backward, ahead, back, pair)
        else:
            forward.run_piece()
            backward.run_piece()
    return forward.finish(), backward.finish()


def _next_with_form(half: ForwardHalf | BackwardHalf) -> int | None:
    """Run what comes before the next layer with a form of its own; return that layer's offset, None at the end."""
    while (piece := half.next_piece) is not None:
        if piece and _form_of(half.stage.layers[piece.start]):
            return piece.start
        half.run_piece()
    return None


def _run_both(forward: ForwardHalf, backward: BackwardHalf, ahead: int, back: int, pair: Overlap) -> None:
    """Run the next layer of each by their own form."""
    due = LayerBackward(backward.stage.layers[back], backward.roots, backward.seeds)
    form = _form_of(due.layer)
    assert form is not None, "the caller has asked"
    where = (
        f"{pair}: {type(due.layer).__name__}.overlapped_forward_backward, forward of layer "
        f"{forward.stage.first_layer + ahead} and backward of layer {backward.stage.first_layer + back},"
    )
    # A form that forgets a gradient would train wrongly without a sign of it.
    reached: set[int] = set()
    hooks = [
        root.register_hook(lambda _, number=number: reached.add(number))  # type: ignore[no-untyped-call]
        for number, root in enumerate(due.outputs)
    ]
    try:
        forward.run_layer(lambda *call: form(LayerForward(*call), due))
    except ChimeraError:
        raise
    except Exception as error:
        raise RunError(f"{where} failed with {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if missed := len(due.outputs) - len(reached):
        raise RunError(
            f"{where} sent back the gradients of {len(reached)} of {len(due.outputs)} outputs, {missed} too few; it "
            "has to do all that backward.run() does"
        )
    backward.end_piece()
