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
    """Means, and correlations of rows, of columns and of keys, are as those of independent draws.

