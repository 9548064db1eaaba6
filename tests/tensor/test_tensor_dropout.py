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


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_elements_are_dropped_independently(p):
    """Means and correlations of rows, of columns and of keys are those of independent draws, within 5 deviations."""
    n = 1024
    first, second = (~keep_mask(torch.Size((n, n)), p, key) for key in (KEY, KEY + 1))
    values = torch.stack((first, second, second.T)).double().sub(p).div((p * (1 - p)) ** 0.5)
    means = torch.cat((values.mean(-1).flatten(), values.mean(-2).flatten()))
    assert means.abs().max() < 5.5 / n**0.5
    assert values.mean().abs() < 5 / (3 * n * n) ** 0.5
    for one, other in ((values[0], values[0]), (values[0].T, values[0].T), (values[0], values[1])):
        correlations = one @ other.T / n
        if one is other or one.data_ptr() == other.data_ptr():
            correlations.fill_diagonal_(0.0)
        assert correlations.abs().max() < (6 if p > 0.05 else 14) / n**0.5
        assert correlations.std() == pytest.approx(1 / n**0.5, rel=0.02)


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
