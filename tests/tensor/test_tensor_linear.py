"""A linear layer's weight gradient can wait, and is then the same."""

import pytest
import torch
from torch import nn

from chimera.tensor.linear import Linear, WeightProducts


class Twice(nn.Module):
    """Uses one weight in two places, the second time transposed by another layer's input."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(4, 4)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


def gradients(module, x):
    """Return the gradients of all parameters and of the input, or None where there is none."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()] + [x.grad.clone()]


def backward(module, x, products=None):
    """Run forward and backward; with ``products`` in two parts. Return what was queued and the gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    loss = module(x).pow(2).sum()
    if products is None:
        loss.backward()
        return [], gradients(module, x)
    with products.queued() as queue:
        loss.backward()
    before = gradients(module, x)
    for product in queue:
        product.add()
    return before, gradients(module, x)


def assert_equal(first, second):
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(Linear(4, 6), nn.GELU(), Linear(6, 3, bias=False)),
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), Linear(5, 3)),
        Twice,
    ],
    ids=["two", "beside foreign layers", "a weight used twice"],
)
def test_gradients_in_two_parts_equal_those_in_one(build):
    """The input's gradient is there after the first part, the weights' after the second."""
    torch.manual_seed(0)
    module = build().double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    _, whole = backward(module, x)
    products = WeightProducts()
    products.serve([module])
    before, after = backward(module, x, products)
    assert_equal(whole, after)
    torch.testing.assert_close(before[-1], whole[-1])
    ours = [layer for layer in module.modules() if isinstance(layer, Linear)]
    assert ours
    waiting = {id(layer.weight) for layer in ours}
    for parameter, gradient in zip(module.parameters(), before, strict=False):
        assert (gradient is None) == (id(parameter) in waiting)


def test_a_backward_that_is_not_split_makes_its_products():
    """Outside ``queued()`` the layer is an ordinary one, also where it serves a schedule with I and W."""
    torch.manual_seed(0)
    module = Linear(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    _, whole = backward(module, x)
    WeightProducts().serve([module])
    _, again = backward(module, x)
    assert_equal(whole, again)


def test_a_frozen_weight_gets_no_product():
    """Neither a frozen weight nor a frozen bias is touched; the input's gradient passes."""
    module = nn.Sequential(Linear(4, 4), Linear(4, 3)).double()
    module[1].weight.requires_grad_(requires_grad=False)
    module[0].bias.requires_grad_(requires_grad=False)
    products = WeightProducts()
    products.serve([module])
    x = torch.randn(2, 4, dtype=torch.float64)
    _, after = backward(module, x, products)
    assert after[0] is not None
    assert after[1] is None
    assert after[2] is None
    assert after[3] is not None
    assert float(after[-1].abs().sum()) > 0


def test_products_add_to_gradients_of_a_wider_type():
    """A bf16 layer's product is added to an fp32 gradient, beside what is there."""
    module = Linear(2, 2, bias=False).to(torch.bfloat16)
    module.weight.grad_dtype = torch.float32
    module.weight.grad = torch.full((2, 2), 256.0)
    products = WeightProducts()
    products.serve([module])
    x = torch.ones(64, 2, dtype=torch.bfloat16)
    with products.queued() as queue:
        module(x).sum().backward()
    for product in queue:
        product.add()
    assert module.weight.grad.dtype is torch.float32
    assert module.weight.grad.tolist() == [[320.0, 320.0], [320.0, 320.0]]


def test_a_backward_that_is_not_split_adds_its_products_itself():
    """With products served, the sums go straight to the fp32 gradient, beside what is there, and not by autograd."""
    module = Linear(2, 2, bias=False).to(torch.bfloat16)
    module.weight.grad_dtype = torch.float32
    total = module.weight.grad = torch.full((2, 2), 256.0)
    WeightProducts(split=False).serve([module])
    for _ in range(64):
        module(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad is total
    assert total.tolist() == [[320.0, 320.0], [320.0, 320.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_on_a_device_are_never_rounded_to_the_narrower_type():
    """256 · 257 products of 1 and 1.0078125 add up in fp32; in bf16 the sum would be off by up to 2⁹."""
    module = Linear(2, 2, bias=False).to("cuda", torch.bfloat16)
    module.weight.grad_dtype = torch.float32
    module.weight.grad = torch.zeros(2, 2, device="cuda")
    WeightProducts(split=False).serve([module])
    module(torch.full((256 * 257, 2), 1.0078125, device="cuda", dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.tolist() == [[256 * 257 * 1.0078125] * 2] * 2


def test_evaluation_takes_the_ordinary_path():
    """Without gradients nothing is queued, and values are bitwise those of nn.Linear."""
    module, plain = Linear(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(module.state_dict())
    WeightProducts().serve([module])
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(module(x), plain(x))


def test_one_backward_queues_at_a_time():
    """A second queue inside the first would take the first one's products."""
    products = WeightProducts()
    with products.queued(), pytest.raises(AssertionError, match="one backward at a time"), products.queued():
        pass
