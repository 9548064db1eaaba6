"""A dropout mask depends on a key and on places in the whole tensor alone."""

import pytest
import torch

from chimera.tensor.dropout import Part, draw_key, dropout, keep_mask


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


KEY = torch.tensor(123456789)


@pytest.mark.parametrize(("dim", "count"), [(0, 2), (1, 4), (2, 2), (3, 3)])
def test_parts_of_a_tensor_have_their_parts_of_the_mask(dim, count):
    """Cut along any dimension, the parts' masks are the whole mask cut."""
    shape = (2, 4, 6, 9)
    whole = keep_mask(torch.Size(shape), 0.4, KEY)
    local = torch.Size(size // count if d == dim else size for d, size in enumerate(shape))
    parts = [keep_mask(local, 0.4, KEY, Part(dim, index, count)) for index in range(count)]
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize(("p", "largest"), [(0.1, 7.0), (0.5, 6.5), (0.9, 7.0)])
def test_elements_are_dropped_independently(p, largest):
    """Means, and correlations of rows, of columns and of keys, are as those of independent draws, in deviations."""
    n = 512
    masks = [(~keep_mask(torch.Size((n, n)), p, key)).double() for key in (KEY, KEY + 1)]
    first, second = ((mask - p) / (p * (1 - p)) ** 0.5 for mask in masks)
    assert first.mean().abs() * n < 5.0
    assert max(first.mean(dim).abs().max() for dim in (0, 1)) * n**0.5 < 5.0
    for one, other in ((first, first), (first.T, first.T), (first, second)):
        correlations = one @ other.T / n**0.5
        if other is not second:
            correlations.fill_diagonal_(0.0)
        assert correlations.abs().max() < largest
        assert correlations.std() == pytest.approx(1.0, rel=0.05)


def test_survivors_are_scaled_and_others_get_no_gradient():
    """The mean stays; gradients pass where values did, with the same factor."""
    values = torch.ones(1000, 100, dtype=torch.float64, requires_grad=True)
    out = dropout(values, 0.2, training=True)
    out.sum().backward()
    assert set(out.detach().unique().tolist()) == {0.0, 1.25}
    assert float(out.detach().mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(values.grad, out.detach())


def test_a_key_is_one_number_of_the_default_generator():
    """Equal seeds give equal masks, another call another mask; a key that is given leaves the generator alone."""
    values = torch.ones(64, 64)
    torch.manual_seed(1)
    first, second = dropout(values, 0.5, training=True), dropout(values, 0.5, training=True)
    torch.manual_seed(1)
    assert torch.equal(dropout(values, 0.5, training=True), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    assert torch.equal(
        dropout(values, 0.5, training=True, key=KEY), dropout(values, 0.5, training=True, key=KEY.clone())
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert draw_key(values.device) != draw_key(values.device)


def test_nothing_is_dropped_outside_training():
    """In evaluation, or with probability 0, the values themselves come back and no number is drawn."""
    values = torch.ones(2, 2)
    state = torch.get_rng_state()
    assert dropout(values, 0.5, training=False) is values
    assert dropout(values, 0.0, training=True) is values
    assert torch.equal(torch.get_rng_state(), state)
