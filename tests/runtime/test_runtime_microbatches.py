"""Cutting batches: nothing padded, dropped or repeated; signatures tell which micro-batches look alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chimera.errors import UsageError
from chimera.runtime.microbatches import cut, signature, to_device


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_a_tensor_is_cut_into_parts_that_differ_by_at_most_one_sample(case):
    """The parts make up the batch, in order; the first ones are a sample longer."""
    samples, m = case
    batch = torch.arange(2 * samples).view(samples, 2)
    parts = cut(batch, m, "inputs")
    assert torch.equal(torch.cat(parts), batch)
    lengths = [len(part) for part in parts]
    assert len(lengths) == m
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_fields_are_cut_alike():
    """Every field of a micro-batch holds the same samples."""
    batch = {"ids": torch.arange(5), "mask": torch.arange(10).view(5, 2)}
    parts = cut(batch, 2, "inputs")
    assert [part["ids"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["mask"].tolist() for part in parts] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]


def test_a_list_is_taken_as_it_is():
    """A list already holds one entry per micro-batch, whatever their lengths."""
    entries = [torch.zeros(3), torch.zeros(1)]
    assert cut(entries, 2, "inputs") == entries
    with pytest.raises(UsageError, match="targets: got a list of 2 micro-batches; the schedule runs 3"):
        cut(entries, 3, "targets")


def test_signatures_tell_shapes_types_and_names_apart():
    """Values do not matter, everything that shapes a message does."""
    same = signature({"x": torch.zeros(2, 3)})
    assert signature({"x": torch.ones(2, 3)}) == same
    others = [{"y": torch.zeros(2, 3)}, {"x": torch.zeros(3, 2)}, {"x": torch.zeros(2, 3).double()}, torch.zeros(2, 3)]
    assert len({same, *map(signature, others)}) == 5


def test_micro_batches_are_tensors_or_fields_of_tensors():
    """Anything else is refused by its type."""
    with pytest.raises(UsageError, match="a micro-batch is of type list; needed: a tensor, or a mapping"):
        to_device([1, 2], torch.device("cpu"))
    with pytest.raises(UsageError, match="a micro-batch is of type int"):
        to_device({"x": 1}, torch.device("cpu"))
