"""How one parameter lies over tensor-parallel ranks: cut along a dimension, or whole on each of them.

The marking travels on the parameter. From it others know a parameter's global shape, which rows are here, whether its
square counts once or is summed in a norm, and whether its gradient is still to be summed over the ranks. Knows no
collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from chimera.tensor.parallel import TensorParallel

__all__ = [
    "WHOLE",
    "Piece",
    "Segment",
    "Sharding",
    "copy_sharding",
    "draw_normal",
    "even_segments",
    "mark",
    "mark_copies",
    "sharding_of",
]

_ATTRIBUTE = "tensor_sharding"


class Segment(NamedTuple):
    """Consecutive rows that are cut by themselves: ``total`` in the whole parameter, ``part`` on each rank.

    t · part may exceed total: what is beyond it is padding.
    """

    total: int
    part: int


class Piece(NamedTuple):
    """``length`` rows that stand at ``whole`` in the whole parameter and at ``here`` in this rank's part."""

    whole: int
    here: int
    length: int


def even_segments(totals: Sequence[int], parallel: TensorParallel) -> tuple[Segment, ...]:
    """Return segments of these lengths, each cut into equal parts.

    Raises:
        UsageError: t does not divide one of them.
    """
    return tuple(Segment(total, parallel.share(total, "the width of a layer")) for total in totals)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a parameter lies over t ranks.

    Attributes:
        dim: the dimension along which it is cut; None where every rank holds all of it.
        segments: what is cut by itself, in order: one for most, three for queries, keys and values in one matrix.
        rank: this rank's number, 0…t-1.
        size: t.
        partial: whether each rank's gradient is only its own summand, to be summed over the ranks before an update, as
            that of a norm's weight is which saw a part of the sequence. Never with ``dim``.
    """

    dim: int | None = None
    segments: tuple[Segment, ...] = ()
    rank: int = 0
    size: int = 1
    partial: bool = False

    @classmethod
    def cut(cls, dim: int, segments: Sequence[Segment], parallel: TensorParallel) -> "Sharding":
        """Return the sharding of a parameter cut along ``dim``; whole where there is nobody to share it with."""
        return cls(dim, tuple(segments), parallel.rank, parallel.size) if parallel.size > 1 else WHOLE

    @classmethod
    def copied(cls, parallel: TensorParallel, *, partial: bool) -> "Sharding":
        """Return the sharding of a parameter that every rank holds; ``partial`` if each sees a part of what it does."""
        return cls(None, (), parallel.rank, parallel.size, partial) if parallel.size > 1 else WHOLE

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold different parts."""
        return self.dim is not None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What of the whole parameter stands where on this rank; padding is in none of them.

        >>> Sharding(0, (Segment(4, 2), Segment(3, 2)), rank=1, size=2).pieces
        (Piece(whole=2, here=0, length=2), Piece(whole=6, here=2, length=1))
        """
        found, whole, here = [], 0, 0
        for total, part in self.segments:
            first, last = (min(total, (self.rank + end) * part) for end in (0, 1))
            if last > first:
                found.append(Piece(whole + first, here, last - first))
            whole, here = whole + total, here + part
        return tuple(found)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the whole parameter's shape, without padding, given that of this rank's part."""
        sizes = list(shape)
        if self.dim is not None:
            sizes[self.dim] = sum(segment.total for segment in self.segments)
        return tuple(sizes)

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's part, padding included, given the whole parameter's."""
        sizes = list(whole)
        if self.dim is not None:
            sizes[self.dim] = sum(segment.part for segment in self.segments)
        return tuple(sizes)

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter (or of anything of its shape), padded with zeros."""
        if self.dim is None:
            return whole
        part = whole.new_zeros(self.part_shape(whole.shape))
        for piece in self.pieces:
            part.narrow(self.dim, piece.here, piece.length).copy_(whole.narrow(self.dim, piece.whole, piece.length))
        return part

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter, given every rank's part in rank order; padding is left out."""
        if self.dim is None:
            return parts[self.rank]
        whole = parts[0].new_empty(self.whole_shape(parts[0].shape))
        for rank, part in enumerate(parts):
            for piece in Sharding(self.dim, self.segments, rank, self.size).pieces:
                whole.narrow(self.dim, piece.whole, piece.length).copy_(part.narrow(self.dim, piece.here, piece.length))
        return whole


WHOLE = Sharding()
"""A parameter that no other rank shares."""


def mark(parameter: Tensor, sharding: Sharding) -> None:
    """Say how ``parameter`` lies over the ranks."""
    setattr(parameter, _ATTRIBUTE, sharding)


def sharding_of(parameter: Tensor) -> Sharding:
    """Return how ``parameter`` lies over the ranks; ``WHOLE`` where nobody said."""
    found: Sharding = getattr(parameter, _ATTRIBUTE, WHOLE)
    return found


def copy_sharding(source: Tensor, target: Tensor) -> None:
    """Mark ``target`` as ``source`` is."""
    mark(target, sharding_of(source))


def mark_copies(layer: nn.Module, parallel: TensorParallel, *, partial: bool) -> None:
    """Say of every parameter of ``layer`` of which nothing is said yet that each rank holds all of it.

    Args:
        layer: with its submodules.
        parallel: the ranks.
        partial: whether each rank sees a part of what the parameters do.
    """
    for parameter in layer.parameters():
        if not hasattr(parameter, _ATTRIBUTE):
            mark(parameter, Sharding.copied(parallel, partial=partial))


@torch.no_grad()
def draw_normal(parameter: Tensor, *, std: float) -> None:
    """Draw ``parameter`` from N(0, std²) by the default generator, as its part of what one rank alone would draw.

    The whole is drawn and cut, one parameter at a time, so weights do not depend on t. Padding is 0.
    """
    sharding = sharding_of(parameter)
    if not sharding.is_cut:
        nn.init.normal_(parameter, std=std)
        return
    whole = parameter.new_empty(sharding.whole_shape(parameter.shape))
    parameter.copy_(sharding.take(whole.normal_(std=std)))
