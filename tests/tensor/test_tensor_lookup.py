"""Rows looked up in a table add their gradient where gradients are summed, and autograd makes none as large as it."""

import pytest
import torch
from torch.nn import functional

from chimera.tensor.linear import WeightProducts
from chimera.tensor.lookup import looked_up
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding

NUMBERS = torch.tensor([[3, 0, 3], [6, 3, 1]])


def table_and_sum(dtype=torch.float64):
    """Return a table of 7 rows, and the buffer that its gradient is summed in, holding ones."""
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(7, 4, dtype=dtype))
    wide = torch.promote_types(dtype, torch.float32)
    if wide is not dtype:
        table.grad_dtype = wide
    table.grad = torch.ones(7, 4, dtype=wide)
    return table, table.grad


def expected_gradient(table, seed):
    """Return autograd's gradient of the table in fp64."""
    leaf = table.detach().double().requires_grad_()
    functional.embedding(NUMBERS, leaf).backward(seed.double())
    return leaf.grad


def test_rows_are_added_where_the_sum_is():
    """The gradient is autograd's, on top of what was there, in the same buffer; a row read thrice gets all."""
    table, total = table_and_sum()
    seed = torch.randn(2, 3, 4, dtype=torch.float64)
    made = []
    table.register_hook(made.append)
    rows = looked_up(NUMBERS, table, WeightProducts())
    torch.testing.assert_close(rows, functional.embedding(NUMBERS, table), rtol=0, atol=0)
    rows.backward(seed)
    assert table.grad is total
    torch.testing.assert_close(total, 1.0 + expected_gradient(table, seed), rtol=1e-14, atol=1e-14)
    assert made == [None], "autograd made a gradient of its own"


def test_autograd_adds_it_where_completed_gradients_are_told_of():
    """Then the hook that tells hears of the table."""
    table, total = table_and_sum()
    seed = torch.randn(2, 3, 4, dtype=torch.float64)
    products, told = WeightProducts(), []
    products.completed = told.append
    table.register_post_accumulate_grad_hook(told.append)
    looked_up(NUMBERS, table, products).backward(seed)
    assert [parameter is table for parameter in told] == [True]
    torch.testing.assert_close(total, 1.0 + expected_gradient(table, seed), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("told", [False, True])
def test_rows_of_a_narrow_table_are_summed_in_fp32(told):
    """257 + 63 ones for one row are 320, which bf16 cannot count to, one by one or in two parts."""
    table, total = table_and_sum(torch.bfloat16)
    total.zero_()
    products = WeightProducts()
    products.completed = print if told else None
    for count in (257, 63):
        rows = looked_up(torch.full((count,), 2), table, products)
        rows.backward(torch.ones(count, 4, dtype=torch.bfloat16))
    assert total.dtype is torch.float32
    assert total[2].tolist() == [320.0] * 4
    assert not total[[0, 1, 3, 4, 5, 6]].any()


def test_a_frozen_table_gets_nothing_and_no_words_add_nothing():
    """A table that does not train keeps its gradient; an empty micro-batch passes."""
    table, total = table_and_sum()
    looked_up(NUMBERS[:0], table, WeightProducts()).sum().backward()
    table.requires_grad_(requires_grad=False)
    assert not looked_up(NUMBERS, table, WeightProducts()).requires_grad
    assert (total == 1.0).all()


@pytest.mark.parametrize("word", [-1, 7])
def test_what_is_no_word_is_refused_by_an_embedding_in_a_pipeline(word):
    """As by an embedding of its own."""
    embedding = VocabularyEmbedding(Vocabulary(7), 4)
    WeightProducts().serve([embedding])
    with pytest.raises(IndexError):
        embedding(torch.tensor([word]))
