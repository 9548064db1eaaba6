"""Lower bounds on the time and the memory of many layouts at once.

``quick`` needs a schedule's placement alone and serves whole grids of choices; ``tight`` takes the critical paths of
its skeleton, and is as good as a simulation where stages cost what a simulation would charge. Neither rejects a layout
that could win: work cannot be done faster than its ranks do it, nor before their inputs can be there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chimera.plan.search.pricing import Prices
from chimera.plan.search.skeleton import Skeleton, Traits

__all__ = ["Bounds", "Cut", "quick", "tight"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Least time of a step and least memory of a device, as arrays over choices."""

    time_s: Floats
    memory_bytes: Floats


@dataclass(frozen=True, slots=True)
class Cut:
    """Blocks of the first and the last stage, and the fewest of those between."""

    first: int
    middle: int
    last: int

    @classmethod
    def of(cls, blocks: Sequence[int]) -> "Cut":
        """Read it off the blocks of every stage."""
        return cls(blocks[0], min(blocks[1:-1], default=min(blocks)), blocks[-1])


def quick(
    traits: Sequence[Traits],
    prices: Sequence[Prices],
    *,
    blocks: int,
    pipeline: int,
    microbatches: NDArray[np.int64],
    equal: NDArray[np.bool_],
) -> Bounds:
    """Bound all choices of one t and p.

    Args:
        traits: of each schedule.
        prices: for each schedule, those of its number of routes, over the choices.
        blocks: blocks of the model.
        pipeline: p.
        microbatches: m, over the choices.
        equal: whether the cut gives every stage the same number of blocks, over the choices.

    Returns:
        Bounds over [schedule, *choices].
    """
    found = [
        _quick_of_one(one, price, blocks=blocks, pipeline=pipeline, microbatches=microbatches, equal=equal)
        for one, price in zip(traits, prices, strict=True)
    ]
    return Bounds(np.stack([each.time_s for each in found]), np.stack([each.memory_bytes for each in found]))


def _quick_of_one(
    traits: Traits,
    prices: Prices,
    *,
    blocks: int,
    pipeline: int,
    microbatches: NDArray[np.int64],
    equal: NDArray[np.bool_],
) -> Bounds:
    block, embedding, head = (part.sum(axis=0) for part in (prices.block_s, prices.embedding_s, prices.head_s))
    # A cut by cost leaves no stage between the first and the last with fewer than this, and no stage of any kind with
    # more than one block less than the mean of time.
    middle = np.where(equal, blocks / traits.num_stages, float(blocks // traits.num_stages))
    whole = blocks * block + embedding + head
    share = microbatches / traits.routes

    def work(stages: int, firsts: int, lasts: int) -> Floats:
        even = stages * middle * block + firsts * embedding + lasts * head
        return np.where(equal, even, stages * np.maximum(whole / traits.num_stages - block, 0.0)) * share

    busiest = whole * microbatches / pipeline
    for kind in traits.ranks:
        busiest = np.maximum(busiest, work(kind.stages, kind.firsts, kind.lasts))
    filled = np.where(equal, float(traits.fill), max(traits.fill - 1.0, 0.0)) * middle
    waits = filled * (block if traits.whole else prices.block_s[0])
    waits = waits + traits.fill * (1 + traits.whole) * prices.hop_s
    time = np.maximum(busiest, work(*traits.late) + waits) + prices.tail_s
    return Bounds(time, _memory(traits, prices, middle, equal, np.minimum(1.0, microbatches / traits.microbatches)))


def _memory(traits: Traits, prices: Prices, middle: Floats, equal: NDArray[np.bool_], filled: Floats) -> Floats:
    """Return the bytes of the rank that holds most; ``filled`` is the share of the peak that so few micro-batches make.

    Peaks rise with the number of micro-batches, by less and less.
    """
    most = np.zeros(np.broadcast_shapes(middle.shape, prices.block_bytes.shape))
    for kind in traits.ranks:
        ends = kind.firsts + kind.lasts
        per_stage = middle if not ends else np.where(equal, middle, 1.0)
        state = (
            kind.stages * per_stage * prices.block_state_bytes
            + kind.firsts * prices.embedding_state_bytes
            + kind.lasts * prices.head_state_bytes
        )
        most = np.maximum(most, state + kind.peak_stages * filled * per_stage * prices.block_bytes)
    return most


def tight(skeleton: Skeleton, prices: Prices, cuts: Sequence[Cut]) -> Bounds:
    """Bound choices of one schedule, p and m.

    Args:
        skeleton: of the schedule.
        prices: over [choice].
        cuts: of each choice.
    """
    first, middle, last = (np.array([getattr(cut, part) for cut in cuts], np.float64) for part in Cut.__slots__)
    # [kind, choice]: what any stage costs, and what the first and the last cost besides.
    any_stage = middle * prices.block_s
    at_first = (first - middle) * prices.block_s + prices.embedding_s
    at_last = (last - middle) * prices.block_s + prices.head_s
    priced = np.stack([any_stage, at_first, at_last], axis=1)
    paths = np.einsum("pkw,kwc->pc", skeleton.paths, priced) + skeleton.hops[:, None] * prices.hop_s
    equal = np.array([cut.first == cut.middle == cut.last for cut in cuts])
    memory = _memory(skeleton.traits, prices, middle, equal, np.ones(len(cuts)))
    return Bounds(paths.max(axis=0) + prices.tail_s, memory)
