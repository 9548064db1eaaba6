"""Gradients in flat buffers: autograd accumulates into them, at fp32 at least."""

import pytest
import torch
from torch import nn

from chimera.tensor.gradient_buffer import GradientBuffer, gradient_dtype


def parameters(*dtypes):
    return [nn.Parameter(torch.full((2, 3), 0.5, dtype=dtype)) for dtype in dtypes]


@pytest.mark.parametrize(
    ("own", "summed"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_are_summed_in_fp32_or_wider(own, summed):
    """The type is that of the parameter, but fp32 at least; the buffer and the gradient have it."""
    (parameter,) = parameters(own)
    assert gradient_dtype(parameter) is summed
    buffer = GradientBuffer([parameter])
    buffer.attach()
    assert parameter.grad.dtype is buffer.flats[0].dtype is summed


def test_backward_accumulates_into_the_flat_buffer():
    """All gradients are slices of one tensor, in the order of the parameters, and add up over backwards."""
    first, second = parameters(torch.float32, torch.float32)
    buffer = GradientBuffer([first, second])
    buffer.attach()
    for _ in range(3):
        (first.sum() + 2 * second.sum()).backward()
    (flat,) = buffer.flats
    assert flat.tolist() == [3.0] * 6 + [6.0] * 6
    assert first.grad.untyped_storage().data_ptr() == second.grad.untyped_storage().data_ptr() == flat.data_ptr()
    assert first.grad.shape == first.shape


def test_small_gradients_are_not_lost_beside_large_ones_in_bf16():
    """256 and 64 ones make 320 for a bf16 parameter."""
    (parameter,) = parameters(torch.bfloat16)
    buffer = GradientBuffer([parameter])
    buffer.attach()
    for _ in range(320):
        parameter.sum().backward()
    assert parameter.grad.unique().tolist() == [320.0]


def test_frozen_parameters_have_no_place():
    """A parameter that does not train gets no gradient; without any that does, the buffer is empty."""
    first, frozen = parameters(torch.float32, torch.float32)
    frozen.requires_grad_(requires_grad=False)
    buffer = GradientBuffer([first, frozen])
    buffer.attach()
    assert buffer.parameters == (first,)
    assert buffer.flats[0].numel() == 6
    assert frozen.grad is None
    empty = GradientBuffer([frozen])
    empty.zero()
    assert empty.flats == []
    assert empty.squared_norm() == 0.0


def test_types_have_a_buffer_each():
    """Parameters of several gradient types are told apart, and each keeps its place."""
    mixed = parameters(torch.float64, torch.bfloat16, torch.float32)
    buffer = GradientBuffer(mixed)
    buffer.attach()
    assert [(flat.dtype, flat.numel()) for flat in buffer.flats] == [(torch.float64, 6), (torch.float32, 12)]
    sum((index + 1) * p.double().sum() for index, p in enumerate(mixed)).backward()
    assert buffer.flats[0].tolist() == [1.0] * 6
    assert buffer.flats[1].tolist() == [2.0] * 6 + [3.0] * 6


def test_attach_survives_zero_grad():
    """An optimizer's ``zero_grad(set_to_none=True)`` loses nothing: the buffer is attached again as it was."""
    (parameter,) = parameters(torch.float32)
    buffer = GradientBuffer([parameter])
    buffer.attach()
    parameter.sum().backward()
    torch.optim.SGD([parameter]).zero_grad(set_to_none=True)
    assert parameter.grad is None
    buffer.attach()
    assert parameter.grad.unique().tolist() == [1.0]


def test_whole_buffers_are_zeroed_scaled_and_measured():
    """The norm is over every gradient, in fp64."""
    mixed = parameters(torch.float32, torch.float64)
    buffer = GradientBuffer(mixed)
    buffer.attach()
    (3 * mixed[0].sum() + 4 * mixed[1].sum()).backward()
    assert buffer.squared_norm() == pytest.approx(6 * 9 + 6 * 16, rel=1e-15)
    buffer.scale(0.5)
    assert mixed[0].grad.unique().tolist() == [1.5]
    assert mixed[1].grad.unique().tolist() == [2.0]
    buffer.zero()
    assert buffer.squared_norm() == 0.0
