"""Flat buffers: every element has one place, shards are equal, and the published bytes per parameter come out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera.plan.buffers import ALIGNMENT, StateBytes, buffer_layout, state_bytes


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    shards=st.integers(1, 6),
    bucket_size=st.none() | st.integers(1, 500),
)
def test_every_element_is_in_one_portion(sizes, shards, bucket_size):
    """Parameters do not overlap, lie within one bucket, and the shards' portions of each add up to all of it."""
    layout = buffer_layout(sizes, shards=shards, bucket_size=bucket_size)
    places = sorted(zip(layout.offsets, sizes, strict=True), key=lambda place: (place[0], -place[1]))
    end = 0
    for offset, size in places:
        assert offset >= end
        assert offset % ALIGNMENT == 0
        end = offset + size
    assert end <= layout.size
    assert layout.buckets[0][0] == 0
    assert all(before[1] == after[0] for before, after in zip(layout.buckets, layout.buckets[1:], strict=False))
    for bucket, (begin, end) in enumerate(layout.buckets):
        shard_places = [layout.shard(bucket, index) for index in range(shards)]
        assert [place[0] for place in shard_places] == [begin + i * (end - begin) // shards for i in range(shards)]
        assert all((last - first) % ALIGNMENT == 0 for first, last in shard_places)
    for number, size in enumerate(sizes):
        begin, end = layout.buckets[layout.bucket_of(number)]
        assert begin <= layout.offsets[number] <= layout.offsets[number] + size <= end
        portions = [layout.portion(number, index) for index in range(shards)]
        elements = [element for portion in portions for element in range(*portion)]
        assert elements == list(range(size))


def test_buckets_fill_in_the_order_in_which_a_backward_completes_gradients():
    """The last parameters come first, and a bucket closes with the one that fills it."""
    layout = buffer_layout([16, 16, 16, 16, 16], bucket_size=32)
    assert layout.offsets == (64, 48, 32, 16, 0)
    assert layout.buckets == ((0, 32), (32, 64), (64, 80))


@pytest.mark.parametrize(
    ("replicas", "sharded", "expected"), [(1, True, 18), (8, False, 18), (8, True, 6 + 12 / 8), (64, True, 6 + 12 / 64)]
)
def test_mixed_precision_adam_takes_the_published_bytes(replicas, sharded, expected):
    """18 bytes per parameter, 6 + 12 / d with sharded optimizer states (Korthikanti et al. 2022)."""
    size = 1 << 20
    got = state_bytes([size] * 3, replicas=replicas, sharded=sharded, width=2, moments=2)
    assert got.total == 3 * size * expected
    assert (got.parameters, got.gradients) == (6 * size, 12 * size)


def test_wider_types_and_fewer_moments_are_counted():
    """fp32 keeps no second copy, fp64 has gradients of 8 bytes, SGD without momentum keeps nothing."""
    assert state_bytes([160], replicas=1, sharded=False, width=4, moments=2) == StateBytes(640, 640, 1280)
    assert state_bytes([160], replicas=1, sharded=False, width=8, moments=1) == StateBytes(1280, 1280, 1280)
    assert state_bytes([160], replicas=4, sharded=False, width=4, moments=0) == StateBytes(640, 640, 0)
    assert state_bytes([], replicas=4, sharded=True, width=2, moments=2) == StateBytes()
    assert StateBytes(1, 2, 3) + StateBytes(10, 20, 30) == StateBytes(11, 22, 33)
