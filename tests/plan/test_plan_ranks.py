"""The grid of ranks: Megatron's order, the groups, and refusals that name what would do."""

import pytest

from chimera.errors import UsageError
from chimera.plan.ranks import Place, RankGrid


def test_groups_are_those_of_the_published_example():
    """16 ranks, t = 2, p = 4: the groups that Megatron's own documentation of its order lists."""
    grid = RankGrid.of_world(16, tensor=2, pipeline=4)
    assert grid.data == 2
    assert {grid.tensor_group(rank) for rank in range(16)} == {(rank, rank + 1) for rank in range(0, 16, 2)}
    assert {grid.data_group(rank) for rank in range(16)} == {
        *((0, 2), (1, 3), (4, 6), (5, 7)),
        *((8, 10), (9, 11), (12, 14), (13, 15)),
    }
    assert {grid.pipeline_group(rank) for rank in range(16)} == {
        *((0, 4, 8, 12), (1, 5, 9, 13)),
        *((2, 6, 10, 14), (3, 7, 11, 15)),
    }


@pytest.mark.parametrize(("t", "d", "p"), [(1, 1, 1), (2, 1, 3), (4, 3, 2), (1, 4, 2)])
def test_every_rank_has_a_place_of_its_own(t, d, p):
    """Places and ranks are inverse; the groups of each kind divide the ranks into equal parts."""
    grid = RankGrid(tensor=t, data=d, pipeline=p)
    ranks = range(t * d * p)
    assert [grid.rank(grid.place(rank)) for rank in ranks] == list(ranks)
    assert grid.place(0) == Place(0, 0, 0)
    for group, size in ((grid.tensor_group, t), (grid.data_group, d), (grid.pipeline_group, p)):
        assert all(rank in group(rank) and len(group(rank)) == size for rank in ranks)
        assert sorted(rank for members in {group(rank) for rank in ranks} for rank in members) == list(ranks)


def test_holders_of_two_stages_are_the_embedding_group():
    """With t = d = p = 2 those of the first and the last stage have one place of tensor parallelism."""
    grid = RankGrid(tensor=2, data=2, pipeline=2)
    assert grid.holders(3, [0, 1]) == (1, 3, 5, 7)
    assert grid.holders(3, [1, 0, 1]) == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("world_size", "sizes", "message"),
    [
        (8, {"pipeline": 3, "data": 2}, r"8 is not t · d · p = 1 · 2 · 3 = 6; start 6 .*\(1, 2, 4\)"),
        (8, {"pipeline": 3}, r"8 is not a multiple of t · p = 1 · 3 = 3; start 6 or 9 processes"),
        (2, {"pipeline": 4}, r"2 is not a multiple of t · p = 1 · 4 = 4; start 4 processes.* of \(1, 1, 2\)"),
        (8, {"pipeline": 2, "tensor": 3}, r"8 is not a multiple of t · p = 3 · 2 = 6; .* of \(4, 1, 2\), "),
        (12, {"pipeline": 0}, r"pipeline = 0 ranks; needed: at least 1"),
    ],
)
def test_what_is_no_factorisation_is_refused_with_the_nearest(world_size, sizes, message):
    """The message says what the product is and which (tensor, data, pipeline) are closest to it."""
    with pytest.raises(UsageError, match=message):
        RankGrid.of_world(world_size, **sizes)
