"""Lower bounds on the time and the memory of many layouts at once.

``quick`` needs a schedule's placement alone and serves whole grids of choices; ``placed`` takes the cuts too, so that
stages cost what they will; ``tight`` takes the critical paths of the schedule's skeleton, and is as good as a
simulation where stages cost what a simulation would charge. None rejects a layout that could win: work cannot be done
faster than its ranks do it, nor before their inputs can be there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chimera.plan.search.pricing import Floats, Prices
from chimera.plan.search.skeleton import Skeleton, Traits

__all__ = ["Bounds", "placed", "quick", "tight"]


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Least time of a step and least memory of a device, as arrays over choices."""

    time_s: Floats
    memory_bytes: Floats


def quick(
    traits: Sequence[Traits],
    prices: Sequence[Prices],
    chunks: Sequence[int],
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
        chunks: v of each schedule.
        blocks: blocks of the model.
        pipeline: p.
        microbatches: m, over the choices.
        equal: whether the cut gives every stage the same number of blocks, over the choices.

    Returns:
        Bounds over [schedule, *choices].
    """
    summed = {id(price): _Sums.of(price, blocks) for price in prices}  # as many as routes differ
    found = [
        _quick_of_one(
            one,
            price,
            summed[id(price)],
            v,
            blocks=blocks,
            pipeline=pipeline,
            microbatches=microbatches,
            equal=equal,
        )
        for one, price, v in zip(traits, prices, chunks, strict=True)
    ]
    return Bounds(np.stack([each.time_s for each in found]), np.stack([each.memory_bytes for each in found]))


class _Sums(NamedTuple):
    """Times of F, I and W together, of all F and I, and bytes of all states; over the choices."""

    block: Floats
    embedding: Floats
    head: Floats
    whole: Floats
    through: Floats
    states: Floats

    @classmethod
    def of(cls, prices: Prices, blocks: int) -> "_Sums":
        block, embedding, head = (part.sum(axis=0) for part in (prices.block_s, prices.embedding_s, prices.head_s))
        states = blocks * prices.block_state_bytes + prices.embedding_state_bytes + prices.head_state_bytes
        whole = blocks * block + embedding + head
        outward = blocks * prices.block_s[2] + prices.embedding_s[2] + prices.head_s[2]
        return cls(block, embedding, head, whole, whole - outward, states)


def _quick_of_one(
    traits: Traits,
    prices: Prices,
    sums: _Sums,
    chunks: int,
    *,
    blocks: int,
    pipeline: int,
    microbatches: NDArray[np.int64],
    equal: NDArray[np.bool_],
) -> Bounds:
    block, embedding, head, whole, through, states = sums
    level = _level(traits, sums, pipeline)
    # A cut by cost leaves no rank more than a block below the level, and stages of a rank differ by a block.
    per_stage = pipeline / traits.num_stages
    middle = np.where(equal, blocks / traits.num_stages, np.maximum(level * (per_stage / block) - (per_stage + 1), 1.0))
    share = microbatches / traits.routes
    stage = middle * block

    def work(stages: int, firsts: int, lasts: int) -> Floats:
        """Return what such a rank does per micro-batch and route where stages are equal."""
        total: Floats = stages * stage
        if firsts:
            total = total + embedding
        return total + head if lasts else total

    least = np.maximum(level - block, 0.0) * microbatches
    busiest = whole * (microbatches / pipeline)
    if traits.routes == 1:  # no rank has a part of a block
        busiest = np.maximum(busiest, -(-blocks // pipeline) * block * microbatches)
    even = work(*traits.late) * share
    for kind in traits.ranks:
        busiest = np.maximum(busiest, np.where(equal, work(kind.stages, kind.firsts, kind.lasts) * share, least))
    if chunks > 1:
        busiest = busiest + 2 * chunks * _held_up(prices, chunks) * microbatches
    filled = np.where(equal, float(traits.fill), max(traits.fill - 1.0, 0.0)) * middle
    waits = filled * (block if traits.whole else prices.block_s[0])
    waits = waits + traits.fill * (1 + traits.whole) * prices.hop_s
    fewest = np.where(equal, middle, 1.0)
    # Every micro-batch goes through all stages and back.
    alone = (whole if traits.whole else through) + 2 * traits.hops * prices.hop_s
    time = (
        np.maximum(np.maximum(busiest, alone), np.where(equal, even, least) + waits)
        + prices.tail_s
        + fewest * prices.block_reduce_s
    )
    filling = np.minimum(1.0, microbatches / traits.microbatches)
    memory = np.maximum(_memory(traits, prices, middle, equal, filling), states * (traits.routes / pipeline))
    return Bounds(time, memory)


def _level(traits: Traits, sums: _Sums, pipeline: int) -> Floats:
    """Return the time per micro-batch up to which a cut by cost fills all ranks but those that have more by themselves.

    The ranks of the first and the last stage may: they have a block for each stage, and embedding or head.
    """
    first, last = traits.holders[0], traits.holders[-1]
    own = traits.num_stages * len(first) / pipeline * sums.block
    level = sums.whole / pipeline
    if first == last:
        loads = [(len(first), own + sums.embedding + sums.head)]
    else:
        both = 2 * own + sums.embedding + sums.head
        loads = [(len(last), own + sums.head), (len(first) + len(last), both)]
        loads.append((len(first), own + sums.embedding))
    for ranks, load in loads:
        if ranks < pipeline:
            level = np.minimum(level, (sums.whole - load) * (1 / (pipeline - ranks)))
    return level


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


def _held_up(prices: Prices, chunks: int) -> Floats:
    """Return by how much messages between the chunks of a rank hold up the F and the B of a stage."""
    return prices.hop_s * (chunks - 1) / chunks


def placed(traits: Traits, prices: Prices, cuts: NDArray[np.int64], *, chunks: int, microbatches: int) -> Floats:
    """Return the least time of choices of one placement and m, whatever the order.

    Args:
        traits: of the schedule.
        prices: over [choice].
        cuts: [choice, stage], blocks of each stage.
        chunks: v of the schedule.
        microbatches: m.
    """
    forward, inward, outward = _priced(prices, cuts, chunks)
    back = inward + outward if traits.whole else inward
    both = forward + back
    alone = both.sum(axis=-1) + 2 * traits.hops * prices.hop_s
    # Nothing is on a rank before its first stage can start; behind its last gradient all stages before that one follow.
    hops = traits.hops_before * prices.hop_s[:, None]
    starts, ends = (_before(times)[:, traits.first_stage] + hops for times in (forward, back))
    share = microbatches // traits.routes
    holds = traits.holds.T.astype(np.float64)
    through = starts + share * (both @ holds) + ends
    busy = starts + share * ((forward + inward + outward) @ holds)
    least = np.maximum(alone, np.maximum(through, busy).max(axis=-1))
    return np.asarray(least + _tail(prices, cuts))


def tight(skeleton: Skeleton, traits: Traits, prices: Prices, cuts: NDArray[np.int64], *, chunks: int) -> Bounds:
    """Bound choices of one schedule, p and m.

    Args:
        skeleton: of the schedule.
        traits: of the schedule.
        prices: over [choice].
        cuts: [choice, stage], blocks of each stage.
        chunks: v of the schedule.
    """
    priced = _priced(prices, cuts, chunks)
    paths = np.einsum("pks,kcs->pc", skeleton.paths, priced) + skeleton.hops[:, None] * prices.hop_s
    state = cuts * prices.block_state_bytes[:, None]
    state[:, 0] += prices.embedding_state_bytes
    state[:, -1] += prices.head_state_bytes
    kept = cuts * prices.block_bytes[:, None]
    kept[:, -1] += prices.head_bytes
    held = skeleton.peak_stages * np.where(traits.holds, kept[:, None, :], np.inf).min(axis=-1)
    memory = state @ traits.holds.T + held
    return Bounds(paths.max(axis=0) + _tail(prices, cuts), memory.max(axis=-1))


def _priced(prices: Prices, cuts: NDArray[np.int64], chunks: int) -> Floats:
    """Return the times of stages, [kind F I W, choice, stage]."""
    priced = prices.block_s[..., None] * cuts
    priced[:2] += _held_up(prices, chunks)[:, None]
    priced[..., 0] += prices.embedding_s
    priced[..., -1] += prices.head_s
    return priced


def _before(times: Floats) -> Floats:
    """Return the sum over all stages before each, [choice, stage]."""
    return np.asarray(np.cumsum(times, axis=-1) - times)


def _tail(prices: Prices, cuts: NDArray[np.int64]) -> Floats:
    """Return what follows the last gradient at least."""
    return np.asarray(prices.tail_s + cuts.min(axis=-1) * prices.block_reduce_s)
