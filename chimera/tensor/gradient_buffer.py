"""One flat gradient buffer for a set of parameters, into which autograd accumulates directly.

Every parameter's ``grad`` is a view of the buffer, in fp32 or the parameter's own type where that is wider, so
micro-batches sum at full precision and one collective reduces them all. The buffer knows neither stages nor groups.
"""

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["GradientBuffer", "gradient_dtype"]


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type gradients of ``parameter`` are summed in: fp32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


class GradientBuffer:
    """Flat storage for the gradients of ``parameters``, one tensor per gradient type (almost always just one).

    Attributes:
        flats: the one-dimensional buffers, to be reduced, scaled or measured as a whole.
        views: for each parameter, its slice of a flat buffer, in the parameter's shape.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(p for p in parameters if p.requires_grad)
        dtypes = dict.fromkeys(gradient_dtype(p) for p in self.parameters)
        self.flats: list[torch.Tensor] = []
        views: dict[int, torch.Tensor] = {}
        for dtype in dtypes:
            members = [p for p in self.parameters if gradient_dtype(p) is dtype]
            flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=members[0].device)
            for parameter, piece in zip(members, torch.split(flat, [p.numel() for p in members]), strict=True):
                views[id(parameter)] = piece.view(parameter.shape)
            self.flats.append(flat)
        self.views = tuple(views[id(p)] for p in self.parameters)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.dtype is not view.dtype:
                parameter.grad_dtype = view.dtype

    def attach(self) -> None:
        """Point every parameter's ``grad`` at its view, whatever an optimizer's ``zero_grad`` made of it."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def zero(self) -> None:
        """Set all gradients to zero."""
        for flat in self.flats:
            flat.zero_()

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        for flat in self.flats:
            flat.mul_(factor)

    def squared_norm(self) -> float:
        """Return the sum of the squared gradients, in fp64."""
        return sum(float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2 for flat in self.flats)
