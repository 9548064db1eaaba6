"""One flat gradient buffer for parameters of one type, into which autograd accumulates directly.

Every parameter's ``grad`` is a view of the buffer, in fp32 or the parameter's own type where that is wider, so
micro-batches sum at full precision and one collective reduces many. The buffer knows neither stages nor groups.
"""

from collections.abc import Sequence

import torch
from torch import nn

from chimera.plan.buffers import BufferLayout, buffer_layout

__all__ = ["GradientBuffer", "gradient_dtype", "of_one_type"]


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type gradients of ``parameter`` are summed in: fp32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def of_one_type(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters that train by type, almost always one list; none where nothing trains."""
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    return list(by_type.values())


class GradientBuffer:
    """Flat storage for the gradients of ``parameters``, which are of one type and train.

    Args:
        parameters: at least one.
        layout: where each has its place; by default one behind the other in one bucket.

    Attributes:
        flat: the one-dimensional buffer; what no parameter takes of it is zero.
        views: for each parameter, its slice of ``flat``, in the parameter's shape.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: BufferLayout | None = None) -> None:
        self.parameters = tuple(parameters)
        self.layout = layout or buffer_layout([p.numel() for p in parameters])
        first = parameters[0]
        self.flat = torch.zeros(self.layout.size, dtype=gradient_dtype(first), device=first.device)
        self.views = tuple(
            self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            for parameter, offset in zip(parameters, self.layout.offsets, strict=True)
        )
        for parameter, view in zip(parameters, self.views, strict=True):
            if parameter.dtype is not view.dtype:
                parameter.grad_dtype = view.dtype

    def attach(self) -> None:
        """Point every parameter's ``grad`` at its view, whatever an optimizer's ``zero_grad`` made of it."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def detach(self) -> None:
        """Take every parameter's ``grad`` away: what stands in the buffer is not the parameter's whole gradient."""
        for parameter in self.parameters:
            parameter.grad = None
