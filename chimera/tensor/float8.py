"""Products of linear layers in float8, of whose matrices tensor-parallel ranks may have a part each.

A matrix is scaled as a whole, so that its largest element becomes the largest number of its type: E4M3 for inputs and
weights, E5M2 for gradients (Micikevicius et al. 2022, arXiv 2209.05433). The ranks agree on that element, so that they
round as one rank alone would. What a layer is, and when its products are made, is not known here.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from chimera.tensor.parallel import TensorParallel

__all__ = ["Float8Products", "Scaled", "product", "scaled"]

_FORWARD: Final = torch.float8_e4m3fn
_GRADIENT: Final = torch.float8_e5m2
_SMALLEST: Final = 1e-12
"""What the largest element counts as where all are smaller, as in torchao."""
_MULTIPLE: Final = 16
"""What devices ask the inner size of a product, and the columns of its result, to be multiples of."""


class Scaled(NamedTuple):
    """A matrix in float8: ``elements`` times ``factor``, an fp32 number."""

    elements: Tensor
    factor: Tensor

    @property
    def T(self) -> "Scaled":  # noqa: N802 - as tensors name it
        """The transposed matrix."""
        return Scaled(self.elements.T, self.factor)


def scaled(values: Tensor, largest: Tensor, dtype: torch.dtype) -> Scaled:
    """Return ``values`` as a matrix, all dimensions but the last joined, in the float8 type ``dtype``.

    Args:
        values: ``[…, columns]``.
        largest: magnitude of the largest element, a number; what exceeds it saturates.
        dtype: one of torch's float8 types.
    """
    limit = torch.finfo(dtype).max
    scale = (limit / largest.double().clamp(min=_SMALLEST)).float()
    elements = (values.flatten(0, -2).float() * scale).clamp(-limit, limit).to(dtype)
    return Scaled(elements, scale.reciprocal())


def product(left: Scaled, right: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return ``left`` · ``right`` in ``dtype``, padded within to what devices ask for.

    It is summed in fp32, with ``fast`` as quickly as the device can, which may be less exact.
    """
    (_, inner), columns = left.elements.shape, right.elements.shape[1]
    result: Tensor = functional.scaled_mm(
        _padded(left.elements, columns=inner),
        # By columns, as devices read it.
        _padded(right.elements.T, columns=inner, rows=columns).T,
        left.factor,
        ScalingType.TensorWise,
        right.factor,
        ScalingType.TensorWise,
        output_dtype=dtype,
        use_fast_accum=fast,
    )
    return result[:, :columns]


class Float8Products:
    """The products of one pass of a linear layer, forward and back, in this order.

    Args:
        parallel: the ranks that have parts of its matrices, or all of them; all call its methods in one order.
    """

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._inputs: Tensor | None = None
        self._weight: Tensor | None = None
        self._gradient: Tensor | None = None

    def output(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return ``inputs`` · weightᵀ, ``[…, out]``, of ``[…, in]`` and ``[out, in]``; a collective."""
        self._inputs, self._weight = self._largest(inputs, weight).unbind()
        left, right = scaled(inputs, self._inputs, _FORWARD), scaled(weight, self._weight, _FORWARD)
        # Torchao is fast here, too, and exact in the backward.
        return torch.unflatten(product(left, right.T, inputs.dtype, fast=True), 0, inputs.shape[:-1])

    def begin_backward(self, gradient: Tensor) -> None:
        """Take note of the output's gradient ``[…, out]``; a collective."""
        self._gradient = self._largest(gradient)[0]

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return ``gradient`` · weight, ``[…, in]``, of ``[…, out]`` and ``[out, in]``."""
        assert self._weight is not None, "the forward comes first"
        assert self._gradient is not None, "the backward has begun"
        left, right = scaled(gradient, self._gradient, _GRADIENT), scaled(weight, self._weight, _FORWARD)
        return torch.unflatten(product(left, right, gradient.dtype), 0, gradient.shape[:-1])

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return gradientᵀ · ``inputs``, ``[out, in]`` in ``dtype``, of ``[tokens, out]`` and ``[tokens, in]``."""
        assert self._inputs is not None, "the forward comes first"
        assert self._gradient is not None, "the backward has begun"
        return product(scaled(gradient, self._gradient, _GRADIENT).T, scaled(inputs, self._inputs, _FORWARD), dtype)

    def _largest(self, *matrices: Tensor) -> Tensor:
        """Return the magnitude of each matrix's largest element, on whichever rank that is."""
        here = torch.stack([torch.linalg.vector_norm(matrix.detach(), torch.inf).float() for matrix in matrices])
        return here if self._parallel.size == 1 else self._parallel.start_maximum(here).wait()


def _padded(elements: Tensor, *, columns: int, rows: int = 0) -> Tensor:
    """Return a matrix in row order, with zeros behind as many columns and rows as make up whole multiples."""
    behind = (0, -columns % _MULTIPLE, 0, -rows % _MULTIPLE)
    # As bytes, of which 0 is the float8 number 0: not every operation takes float8.
    in_order = elements.view(torch.uint8).contiguous()
    return (functional.pad(in_order, behind) if any(behind) else in_order).view(elements.dtype)
