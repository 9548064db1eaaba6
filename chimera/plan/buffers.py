"""Where parameters stand in a flat buffer, how that is cut into buckets and shards, and the bytes it takes.

The runtime allocates by this arithmetic and a plan predicts by it, so neither can drift from the other. It knows sizes
only: neither tensors nor which parameters a stage has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "DEFAULT_BUCKET_BYTES", "BufferLayout", "StateBytes", "buffer_layout", "state_bytes"]

ALIGNMENT = 16
"""Every parameter and every shard begins at a multiple of so many elements, as vector instructions want."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Gradients that one collective sums: enough to use a link fully, yet soon complete (the default of torch's DDP)."""


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Places in one flat buffer, in elements.

    Parameters stand in reverse order, because a backward completes the last ones first; so bucket 0 is complete first.

    Attributes:
        sizes: of each parameter.
        offsets: where each begins.
        buckets: (begin, end) of each bucket, in order; each holds whole parameters and is cut into equal shards.
        shards: into how many.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    buckets: tuple[tuple[int, int], ...]
    shards: int

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def shard(self, bucket: int, index: int) -> tuple[int, int]:
        """Return (begin, end) of one shard of a bucket."""
        begin, end = self.buckets[bucket]
        length = (end - begin) // self.shards
        return begin + index * length, begin + (index + 1) * length

    def bucket_of(self, parameter: int) -> int:
        """Return the bucket that holds a parameter."""
        return next(
            number for number, (begin, end) in enumerate(self.buckets) if begin <= self.offsets[parameter] < end
        )

    def portion(self, parameter: int, index: int) -> tuple[int, int]:
        """Return (begin, end) of what one shard holds of a parameter, in elements of the parameter; empty if nothing.

        >>> layout = buffer_layout([40, 8], shards=2)
        >>> [layout.portion(0, index) for index in range(2)], [layout.portion(1, index) for index in range(2)]
        ([(0, 16), (16, 40)], [(0, 8), (0, 0)])
        """
        offset, size = self.offsets[parameter], self.sizes[parameter]
        begin, end = (min(max(place - offset, 0), size) for place in self.shard(self.bucket_of(parameter), index))
        return (begin, end) if begin < end else (0, 0)


def buffer_layout(sizes: Sequence[int], *, shards: int = 1, bucket_size: int | None = None) -> BufferLayout:
    """Lay out parameters of these sizes.

    Args:
        sizes: elements of each parameter, in the order of the model.
        shards: equal parts of each bucket, one per replica that holds the buffer.
        bucket_size: elements at which a bucket is full; None makes one bucket.

    >>> buffer_layout([40, 8], shards=2)
    BufferLayout(sizes=(40, 8), offsets=(16, 0), buckets=((0, 64),), shards=2)
    """
    offsets = [0] * len(sizes)
    buckets = []
    begin = end = 0
    for number in reversed(range(len(sizes))):
        offsets[number] = end
        # One that is empty has a place all the same.
        end += _rounded_up(max(sizes[number], 1), ALIGNMENT)
        if number == 0 or (bucket_size is not None and end - begin >= bucket_size):
            end = begin + _rounded_up(end - begin, ALIGNMENT * shards)
            buckets.append((begin, end))
            begin = end
    return BufferLayout(tuple(sizes), tuple(offsets), tuple(buckets), shards)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that a rank keeps for parameters, apart from activations.

    Attributes:
        parameters: in the type that computes.
        gradients: in the type they are summed in.
        optimizer: full-precision originals where computation is narrower, and the optimizer's moments.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    sizes: Sequence[int],
    *,
    replicas: int,
    sharded: bool,
    width: int,
    moments: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> StateBytes:
    """Return the bytes of parameters that are reduced together on one of their replicas.

    Args:
        sizes: elements of each parameter of a stage, or of one tied group.
        replicas: ranks that hold them, routes · d.
        sharded: whether each replica updates a share of 1 / replicas.
        width: bytes of an element in the type that computes: 2, 4 or 8.
        moments: tensors that the optimizer keeps per parameter: 2 for AdamW and LAMB, 1 for SGD with momentum.
        bucket_bytes: of gradients, as the runtime has them.

    >>> state_bytes([1 << 20], replicas=4, sharded=True, width=2, moments=2).total / (1 << 20)  # 6 + 12 / 4
    9.0
    """
    wide = max(width, 4)
    shards = replicas if sharded else 1
    layout = buffer_layout(sizes, shards=shards, bucket_size=bucket_bytes // wide)
    elements = sum(sizes)
    # Sharded weights stand in a flat buffer, padded; others are tensors of their own.
    held, updated = (layout.size, layout.size // shards) if shards > 1 else (elements, elements)
    copies = moments + (wide > width)
    return StateBytes(held * width, layout.size * wide, updated * copies * wide)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
