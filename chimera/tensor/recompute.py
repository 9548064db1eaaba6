"""Recomputing a part of a layer in the backward instead of keeping what it made in the forward.

Of attention the core between the projections is worth it: it makes the most activations for the least work (Korthikanti
et al. 2022, section 5, "selective"). A part has no parameters of its own and draws no random numbers: keys of its
dropout are among its inputs. Recomputing whole layers is the stage's business.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["RecomputeMode", "RecomputesCore", "recompute_cores", "recomputed"]

RecomputeMode = Literal["none", "selective", "full"]
"""What is computed again in the backward instead of kept: nothing, the cores of attention, or whole layers."""


class RecomputesCore:
    """Base of modules with a core that can be recomputed.

    Attributes:
        recompute_core: whether to do so.
    """

    recompute_core: bool = False


def recompute_cores(layers: Sequence[nn.Module]) -> int:
    """Have every module in ``layers`` that can recompute its core do so, and return how many there are."""
    found = [module for layer in layers for module in layer.modules() if isinstance(module, RecomputesCore)]
    for module in found:
        module.recompute_core = True
    return len(found)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Return ``function(*inputs)``, of which only the inputs are kept for the backward.

    Args:
        function: depends on its inputs alone, and draws no random numbers.
        *inputs: tensors, or None where one is left out.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    result: Tensor = _Recomputed.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return result


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(requires_grad=needed)
            for tensor, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        leaves = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        of_leaves = iter(torch.autograd.grad(output, leaves, gradient))
        return None, *(next(of_leaves) if needed else None for needed in wanted)
