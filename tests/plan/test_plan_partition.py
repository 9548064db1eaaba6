"""The cut of layers into stages: nothing lost, none empty, as even as can be."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.errors import UsageError
from chimera.plan.partition import partition

# Whole numbers, so that sums are exact whatever their order.
COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)
CUTS = COSTS.flatmap(lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs))))


def loads(costs, layer_to_stage, num_stages):
    return [sum(c for c, stage in zip(costs, layer_to_stage, strict=True) if stage == s) for s in range(num_stages)]


def every_cut(costs, num_stages):
    """Return the loads of every way to cut the layers into stages that hold at least one each."""
    inner = combinations(range(1, len(costs)), num_stages - 1)
    return [[sum(costs[a:b]) for a, b in pairwise((0, *cut, len(costs)))] for cut in inner]


@given(CUTS)
def test_stages_are_contiguous_and_none_is_empty(case):
    """Every layer has a stage, stages ascend, and each has a layer; so all cost is there."""
    costs, num_stages = case
    stages = partition(costs, num_stages)
    assert len(stages) == len(costs)
    assert list(stages) == sorted(stages)
    assert set(stages) == set(range(num_stages))
    assert sum(loads(costs, stages, num_stages)) == sum(costs)


@given(CUTS)
def test_the_heaviest_stage_is_as_light_as_any_cut_allows(case):
    """No cut has a lighter heaviest stage, and none of those that tie has a smaller sum of squares."""
    costs, num_stages = case
    found = loads(costs, partition(costs, num_stages), num_stages)
    best = min((max(cut), sum(load**2 for load in cut)) for cut in every_cut(costs, num_stages))
    assert (max(found), sum(load**2 for load in found)) == best


@settings(deadline=None)
@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), st.sampled_from([1.0, 0.1, 3e-7])
)
def test_equal_costs_give_counts_that_differ_by_at_most_one(case, cost):
    """The first stages hold the layers that are left over."""
    num_layers, num_stages = case
    stages = partition([cost] * num_layers, num_stages)
    counts = [stages.count(stage) for stage in range(num_stages)]
    assert max(counts) - min(counts) <= 1
    if cost == 1.0:  # sums of the others differ in their last bits
        assert counts == sorted(counts, reverse=True)


def test_a_heavy_head_gets_a_stage_of_its_own():
    """Embeddings and a decoder that cost as much as several blocks are weighed as such."""
    assert partition([1, 2, 2, 2, 2, 6], 3) == (0, 0, 0, 1, 1, 2)
    assert loads([1, 9, 6, 2, 10], partition([1, 9, 6, 2, 10], 4), 4) == [10, 6, 2, 10]


def test_more_stages_than_layers_are_refused():
    """The message gives both numbers and the largest number of stages that works."""
    with pytest.raises(UsageError, match=r"got 5 stages for 4 layers; .* at most 4 stages"):
        partition([1.0] * 4, 5)
