"""The search: all layouts bounded at once, then the most promising simulated until no bound promises more.

Best first. A layout is first known by a bound from its placement, made for whole grids of choices. When that bound is
the least of all, the schedule's skeleton gives a tighter one to all layouts that share it. When that is the least, the
layout is simulated. As soon as the k-th best of the simulated beats every bound that is left, the answer is final.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from chimera.errors import UsageError
from chimera.plan.estimate import Estimate
from chimera.plan.hardware import Cluster
from chimera.plan.search.bounds import Bounds, quick, tight
from chimera.plan.search.cuts import cut_by_cost, equal_cut
from chimera.plan.search.pricing import Prices, Pricing
from chimera.plan.search.skeleton import Traits, skeleton, traits
from chimera.plan.search.space import Grid, Reason, SearchSpace, grids
from chimera.plan.search.variants import MAX_SEARCHED_RANKS
from chimera.plan.shape import ModelShape
from chimera.schedules import SCHEDULES

__all__ = ["Outcome", "least_bytes", "prices_by_routes", "search_layouts"]

_CANDIDATES: Final = 24
"""Layouts with the least memory by their bounds that are estimated, if none fits."""

_Place = tuple[int, int, int]
"""Of a layout in its grid: variant, b, switch."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a search found.

    Attributes:
        best: estimates that fit, the fastest first, at most as many as were asked for.
        rejected: how many layouts are not among them, by reason.
        num_bounded: layouts whose time and memory were bounded as arrays.
        num_simulated: layouts that were simulated.
        closest: of those that do not fit, if none fits, the one that misses least.
    """

    best: tuple[Estimate, ...]
    rejected: Mapping[Reason, int]
    num_bounded: int
    num_simulated: int
    closest: Estimate | None = None


@dataclass(slots=True, eq=False)
class _Bounded:
    """A grid with its bounds, [variant, b, switch]; an infinite time is of a layout that is out."""

    grid: Grid
    traits: tuple[Traits, ...]
    prices: Mapping[int, Prices]
    bounds: Bounds
    refined: set[tuple[int, int]] = field(default_factory=set)

    def prices_of(self, variant: int, b: int) -> Prices:
        """Return the prices over [switch]."""
        return self.prices[self.traits[variant].routes].at(b, slice(None))


def search_layouts(
    shape: ModelShape,
    cluster: Cluster,
    pricing: Pricing,
    *,
    global_batch: int,
    space: SearchSpace,
    top: int,
) -> Outcome:
    """Return the ``top`` fastest layouts that fit.

    Args:
        shape: the model.
        cluster: where it runs.
        pricing: of the model on the cluster.
        global_batch: sequences B of a step.
        space: choices that are given.
        top: how many layouts to return.
    """
    rejected: Counter[Reason] = Counter()
    bounded = [
        each
        for grid in grids(shape, cluster, global_batch=global_batch, space=space, rejected=rejected)
        if (each := _bound(shape, grid, pricing, rejected)) is not None
    ]
    search = _Search(shape, pricing, bounded, rejected, top)
    best = search.run()
    closest = None if best else _closest(shape, pricing, bounded)
    return Outcome(
        best=tuple(best),
        rejected={reason: count for reason in Reason if (count := rejected[reason])},
        num_bounded=sum(each.bounds.time_s.size for each in bounded),
        num_simulated=search.num_simulated,
        closest=closest,
    )


def least_bytes(
    shape: ModelShape, cluster: Cluster, pricing: Pricing, *, global_batch: int, space: SearchSpace
) -> float:
    """Return the least memory that a layout needs, estimated in full; infinite where there is no layout."""
    rejected: Counter[Reason] = Counter()
    found = grids(shape, cluster, global_batch=global_batch, space=space, rejected=rejected)
    bounded = [each for grid in found if (each := _bound(shape, grid, pricing, rejected)) is not None]
    closest = _closest(shape, pricing, bounded)
    return np.inf if closest is None else closest.peak_bytes


def prices_by_routes(pricing: Pricing, grid: Grid, known: Sequence[Traits]) -> Mapping[int, Prices]:
    """Return the prices of a grid over [b, switch], for each number of routes that its schedules have."""
    routes = sorted({each.routes for each in known})
    prices = pricing.prices(grid.choices(routes))
    return {count: prices.at(place, slice(None), slice(None)) for place, count in enumerate(routes)}


def _bound(shape: ModelShape, grid: Grid, pricing: Pricing, rejected: Counter[Reason]) -> _Bounded | None:
    """Bound a grid from the placements of its schedules; those that cannot take p are left out."""
    known: list[Traits] = []
    kept = []
    each = len(grid.microbatch) * len(grid.switches)
    for variant in grid.variants:
        if SCHEDULES[variant.schedule].searched and grid.pipeline > MAX_SEARCHED_RANKS:
            rejected[Reason.SEARCHED] += each
            continue
        try:
            found = traits(variant, grid.pipeline)
        except UsageError:
            rejected[Reason.SCHEDULE] += each
            continue
        if found.num_stages > shape.num_blocks:
            rejected[Reason.STAGES] += each
            continue
        known.append(found)
        kept.append(variant)
    if not kept:
        return None
    grid = Grid(grid.tensor, grid.pipeline, grid.data, grid.global_batch, tuple(kept), grid.microbatch, grid.switches)
    by_routes = prices_by_routes(pricing, grid, known)
    bounds = quick(
        known,
        [by_routes[each.routes] for each in known],
        [variant.chunks or 1 for variant in kept],
        blocks=shape.num_blocks,
        pipeline=grid.pipeline,
        microbatches=np.array([[grid.microbatches(b)] for b in grid.microbatch]),
        equal=grid.equal(),
    )
    usable = next(iter(by_routes.values())).usable_bytes
    divides = np.array([[[shape.num_blocks % each.num_stages == 0]] for each in known]) | ~grid.equal()
    # Replicas of one are not shared out.
    shared = np.array([[[each.routes * grid.data > 1]] for each in known]) | ~grid.choices([1]).sharded
    possible = np.broadcast_to(divides & shared, bounds.time_s.shape)
    fits = bounds.memory_bytes <= usable
    rejected[Reason.SAME] += int((~possible).sum())
    rejected[Reason.MEMORY] += int((possible & ~fits).sum())
    time = np.where(possible & fits, bounds.time_s, np.inf)
    return _Bounded(grid, tuple(known), by_routes, Bounds(time, np.where(possible, bounds.memory_bytes, np.inf)))


class _Search:
    """Best-first search over bounded grids."""

    def __init__(
        self, shape: ModelShape, pricing: Pricing, bounded: list[_Bounded], rejected: Counter[Reason], top: int
    ) -> None:
        self.num_simulated = 0
        self._shape = shape
        self._pricing = pricing
        self._bounded = bounded
        self._rejected = rejected
        self._top = top
        self._waiting: list[tuple[float, int, _Place]] = []
        self._best: list[Estimate] = []

    def run(self) -> list[Estimate]:
        """Return the best estimates; what is left is rejected by its bound."""
        order = self._by_bound()
        following = next(order, None)
        while True:
            coarse = np.inf if following is None else following[0]
            fine = self._waiting[0][0] if self._waiting else np.inf
            if min(coarse, fine) >= self._limit():
                break
            if following is not None and coarse <= fine:
                self._refine(following[1], following[2][:2])
                following = next(order, None)
            else:
                self._simulate(*heapq.heappop(self._waiting)[1:])
        unrefined = sum(self._unrefined(each) for each in self._bounded)
        self._rejected[Reason.BOUND] += unrefined + len(self._waiting)
        return self._best

    def _limit(self) -> float:
        """Return the time that a layout has to beat."""
        return self._best[-1].step_s if len(self._best) == self._top else np.inf

    def _by_bound(self) -> Iterator[tuple[float, int, _Place]]:
        """Yield the layouts that fit by their first bound, least first."""
        times = np.concatenate([each.bounds.time_s.ravel() for each in self._bounded] or [np.empty(0)])
        starts = np.cumsum([0, *(each.bounds.time_s.size for each in self._bounded)])
        order = np.argsort(times, kind="stable")
        for index in order[: int(np.isfinite(times).sum())].tolist():
            number = int(np.searchsorted(starts, index, side="right")) - 1
            shape = self._bounded[number].bounds.time_s.shape
            variant, b, switch = (int(i) for i in np.unravel_index(index - starts[number], shape))
            yield float(times[index]), number, (variant, b, switch)

    def _unrefined(self, each: _Bounded) -> int:
        left = np.isfinite(each.bounds.time_s)
        for variant, b in each.refined:
            left[variant, b] = False
        return int(left.sum())

    def _refine(self, number: int, group: tuple[int, int]) -> None:
        """Bound the layouts of one schedule and micro-batch size by the skeleton, once."""
        each = self._bounded[number]
        if group in each.refined:
            return
        each.refined.add(group)
        variant, b = group
        alive = np.flatnonzero(np.isfinite(each.bounds.time_s[group]))
        grid = each.grid
        if grid.variants[variant].unit == "double" and grid.microbatches(grid.microbatch[b]) <= grid.pipeline:
            # Doubling begins where a unit of p micro-batches ends.
            self._rejected[Reason.SAME] += len(alive)
            return
        try:
            found = skeleton(grid.variants[variant], grid.pipeline, grid.microbatches(grid.microbatch[b]))
        except UsageError:
            self._rejected[Reason.SCHEDULE] += len(alive)
            return
        prices = each.prices_of(variant, b)
        cuts = {switch: self._cut(each, variant, prices, switch) for switch in alive.tolist()}
        same = [s for s in cuts if not grid.switches[s].equal and len(set(cuts[s])) == 1 and self._has_equal(each, s)]
        self._rejected[Reason.SAME] += len(same)
        switches = [switch for switch in cuts if switch not in same]
        if not switches:
            return
        chosen = prices.at(switches)
        bounds = tight(found, chosen, np.array([cuts[s] for s in switches]), chunks=grid.variants[variant].chunks or 1)
        floor = each.bounds.time_s[variant, b, switches]
        for place, switch in enumerate(switches):
            if bounds.memory_bytes[place] > chosen.usable_bytes[place]:
                self._rejected[Reason.MEMORY] += 1
            else:
                time = max(float(bounds.time_s[place]), float(floor[place]))
                heapq.heappush(self._waiting, (time, number, (variant, b, switch)))

    def _has_equal(self, each: _Bounded, switch: int) -> bool:
        return each.grid.switches[switch]._replace(equal=True) in each.grid.switches

    def _cut(self, each: _Bounded, variant: int, prices: Prices, switch: int) -> tuple[int, ...]:
        return _cut(self._shape.num_blocks, each.traits[variant].num_stages, prices, switch, each.grid)

    def _simulate(self, number: int, place: _Place) -> None:
        """Estimate a layout in full and keep it where it is among the best."""
        each = self._bounded[number]
        variant, b, switch = place
        cut = self._cut(each, variant, each.prices_of(variant, b), switch)
        estimate = self._pricing.estimate(each.grid.layout(place, cut))
        self.num_simulated += 1
        if not estimate.fits:
            self._rejected[Reason.MEMORY] += 1
            return
        self._best.append(estimate)
        self._best.sort(key=lambda one: one.step_s)
        if len(self._best) > self._top:
            self._best.pop()
            self._rejected[Reason.SLOWER] += 1


def _cut(blocks: int, num_stages: int, prices: Prices, switch: int, grid: Grid) -> tuple[int, ...]:
    """Return the blocks of each stage."""
    if grid.switches[switch].equal:
        cut = equal_cut(blocks, num_stages)
        assert cut is not None, "an equal cut that does not divide was left in the grid"
        return cut
    block = float(prices.block_s[:, switch].sum())
    embedding, head = (float(part[:, switch].sum()) / block for part in (prices.embedding_s, prices.head_s))
    return cut_by_cost(blocks, num_stages, embedding=embedding, head=head)


def _closest(shape: ModelShape, pricing: Pricing, bounded: list[_Bounded]) -> Estimate | None:
    """Return, of the layouts with the least memory by their bounds, the one that needs least; None without any."""
    found: list[tuple[float, int, _Place]] = []
    for number, each in enumerate(bounded):
        memory = each.bounds.memory_bytes
        for index in np.argsort(memory, axis=None)[:_CANDIDATES].tolist():
            variant, b, switch = (int(i) for i in np.unravel_index(index, memory.shape))
            if np.isfinite(memory[variant, b, switch]):
                found.append((float(memory[variant, b, switch]), number, (variant, b, switch)))
    estimates = []
    for _, number, (variant, b, switch) in sorted(found)[:_CANDIDATES]:
        each = bounded[number]
        cut = _cut(shape.num_blocks, each.traits[variant].num_stages, each.prices_of(variant, b), switch, each.grid)
        with suppress(UsageError):  # a schedule that cannot take so few micro-batches
            estimates.append(pricing.estimate(each.grid.layout((variant, b, switch), cut)))
    return min(estimates, key=lambda one: one.peak_bytes, default=None)
