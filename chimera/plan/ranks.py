"""Who is who among the ranks of a run in three dimensions: tensor, data and pipeline parallelism.

One frozen value says which rank stands where and which ranks form each group, in Megatron's order (Narayanan et al.,
SC'21, section 3): ranks that share their layers are adjacent, then come the data-parallel replicas, and the pipeline is
outermost. Knows numbers only: no schedule, no process and no communicator.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from chimera.errors import UsageError
from chimera.plan.divisors import divisors

__all__ = ["Place", "RankGrid"]

_NUM_SUGGESTIONS = 3


class Place(NamedTuple):
    """Where a rank stands in each dimension."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """t · d · p ranks: rank = (pipeline · d + data) · t + tensor.

    Attributes:
        tensor: t, ranks that share each layer.
        data: d, replicas of the whole pipeline.
        pipeline: p, ranks of one pipeline.

    >>> grid = RankGrid(tensor=2, data=2, pipeline=2)
    >>> grid.place(5), grid.tensor_group(5), grid.data_group(5), grid.pipeline_group(5)
    (Place(tensor=1, data=0, pipeline=1), (4, 5), (5, 7), (1, 5))
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "pipeline"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)} ranks; needed: at least 1")

    @classmethod
    def of_world(cls, world_size: int, *, pipeline: int, tensor: int = 1, data: int | None = None) -> "RankGrid":
        """Return the grid of ``world_size`` ranks; without ``data``, with as many replicas as there are ranks for.

        Raises:
            UsageError: t · d · p is not the world size; the nearest that are, are named.
        """
        least = cls(tensor=tensor, pipeline=pipeline).size
        grid = cls(tensor=tensor, data=max(1, world_size // least) if data is None else data, pipeline=pipeline)
        if grid.size == world_size:
            return grid
        if data is None:
            sizes = dict.fromkeys((world_size // least * least, -(-world_size // least) * least))
            got = f"is not a multiple of t · p = {tensor} · {pipeline} = {least}"
            start = " or ".join(str(size) for size in sizes if size)
        else:
            got = f"is not t · d · p = {tensor} · {data} · {pipeline} = {grid.size}"
            start = str(grid.size)
        nearest = ", ".join(str((g.tensor, g.data, g.pipeline)) for g in grid.nearest(world_size))
        raise UsageError(
            f"world size {world_size} {got}; start {start} processes, or set (tensor, data, pipeline) to one of "
            f"{nearest}"
        )

    def nearest(self, world_size: int) -> list["RankGrid"]:
        """Return the grids of ``world_size`` ranks whose dimensions differ by the smallest factors from these."""
        legal = [
            RankGrid(tensor=t, data=d, pipeline=world_size // (t * d))
            for t in divisors(world_size)
            for d in divisors(world_size // t)
        ]

        def distance(grid: RankGrid) -> float:
            pairs = ((grid.tensor, self.tensor), (grid.data, self.data), (grid.pipeline, self.pipeline))
            return sum(abs(math.log(there / here)) for there, here in pairs)

        return sorted(legal, key=distance)[:_NUM_SUGGESTIONS]

    @property
    def size(self) -> int:
        """All ranks."""
        return self.tensor * self.data * self.pipeline

    @property
    def width(self) -> int:
        """Ranks with the same place in the pipeline, t · d."""
        return self.tensor * self.data

    def place(self, rank: int) -> Place:
        """Return where a rank stands."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        return Place(rank % self.tensor, rank // self.tensor % self.data, rank // self.width)

    def rank(self, place: Place) -> int:
        """Return the rank that stands at ``place``."""
        return (place.pipeline * self.data + place.data) * self.tensor + place.tensor

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share the layers of ``rank``, ascending."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(tensor=tensor)) for tensor in range(self.tensor))

    def data_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold what ``rank`` holds, in every replica of the pipeline, ascending."""
        return self.holders(rank, [self.place(rank).pipeline])

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the pipeline of ``rank``, in the order of their places."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(pipeline=pipeline)) for pipeline in range(self.pipeline))

    def holders(self, rank: int, pipeline: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks at these places of the pipelines of all replicas, with the tensor place of ``rank``.

        These hold the same parameters, where the places hold the same stage, or one tied parameter: with the places of
        the first and the last stage, they are the embedding group.
        """
        tensor = self.place(rank).tensor
        places = (Place(tensor, data, place) for place in sorted(set(pipeline)) for data in range(self.data))
        return tuple(self.rank(place) for place in places)
