"""Gradients in flat buffers: autograd accumulates into them, at fp32 at least."""

import pytest
import torch
from torch import nn

from chimera.tensor.gradient_buffer import GradientBuffer, gradient_dtype, of_one_type


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
    assert parameter.grad.dtype is buffer.flat.dtype is summed


def test_backward_accumulates_into_the_flat_buffer():
    """All gradients are slices of one tensor, the last parameter's first, and add up over backwards."""
    first, second = parameters(torch.float32, torch.float32)
    buffer = GradientBuffer([first, second])
    buffer.attach()
    for _ in range(3):
        (first.sum() + 2 * second.sum()).backward()
    flat = buffer.flat
    assert flat.tolist() == [6.0] * 6 + [0.0] * 10 + [3.0] * 6 + [0.0] * 10
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


def test_parameters_that_train_are_told_apart_by_type():
    """Each type has a list, in the order of the model; what is frozen has no place."""
    mixed = parameters(torch.float64, torch.bfloat16, torch.float32, torch.bfloat16)
    assert of_one_type(mixed) == [[mixed[0]], [mixed[1], mixed[3]], [mixed[2]]]
    mixed[1].requires_grad_(requires_grad=False)
    assert of_one_type(mixed) == [[mixed[0]], [mixed[2]], [mixed[3]]]
    assert of_one_type(mixed[1:2]) == []


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


def test_detach_leaves_no_gradient_that_is_not_whole():
    """After it no parameter has a gradient, and the buffer keeps what it had."""
    (parameter,) = parameters(torch.float32)
    buffer = GradientBuffer([parameter])
    buffer.attach()
    parameter.sum().backward()
    buffer.detach()
    assert parameter.grad is None
    assert buffer.views[0].unique().tolist() == [1.0]
