"""The search: all layouts bounded at once, then the most promising simulated until no bound promises more.

Best first. A layout is first known by a bound from its placement, made for whole grids of choices. When that bound is
the least of all, the cuts are made and give a tighter one to all layouts of its schedule, p and m; when the least of
those is the least of all, the schedule is built and its skeleton gives them a tighter one yet. When that is the least,
the layout is simulated. As soon as the k-th best of the simulated beats every bound that is left, the answer is final.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chimera.errors import UsageError
from chimera.plan.estimate import Estimate
from chimera.plan.hardware import Cluster
from chimera.plan.search.bounded import BoundedGrid, Place, bounded_grids, closest
from chimera.plan.search.bounds import placed, tight
from chimera.plan.search.pricing import Pricing
from chimera.plan.search.skeleton import skeleton
from chimera.plan.search.space import Reason, SearchSpace
from chimera.plan.shape import ModelShape

__all__ = ["Outcome", "search_layouts"]


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
    bounded = bounded_grids(shape, cluster, pricing, global_batch=global_batch, space=space, rejected=rejected)
    search = _Search(pricing, bounded, rejected, top)
    best = search.run()
    return Outcome(
        best=tuple(best),
        rejected={reason: count for reason in Reason if (count := rejected[reason])},
        num_bounded=sum(each.bounds.time_s.size for each in bounded),
        num_simulated=search.num_simulated,
        closest=None if best else closest(pricing, bounded),
    )


class _Group(NamedTuple):
    """Layouts of one schedule, p and m, and their bounds by the cuts: in order of the least."""

    least_s: float
    number: int
    variant: int
    b: int
    switches: tuple[int, ...]
    times_s: tuple[float, ...]


class _Search:
    """Best-first search over bounded grids."""

    def __init__(self, pricing: Pricing, bounded: Sequence[BoundedGrid], rejected: Counter[Reason], top: int) -> None:
        self.num_simulated = 0
        self._pricing = pricing
        self._bounded = bounded
        self._rejected = rejected
        self._top = top
        self._groups: list[_Group] = []
        self._waiting: list[tuple[float, int, Place]] = []
        self._best: list[Estimate] = []

    def run(self) -> list[Estimate]:
        """Return the best estimates; what is left is rejected by its bound."""
        order = self._by_bound()
        following = next(order, None)
        while True:
            coarse = np.inf if following is None else following[0]
            middle = self._groups[0].least_s if self._groups else np.inf
            fine = self._waiting[0][0] if self._waiting else np.inf
            if min(coarse, middle, fine) >= self._limit():
                break
            if following is not None and coarse <= min(middle, fine):
                self._place(following[1], following[2][:2])
                following = next(order, None)
            elif middle <= fine:
                self._refine(heapq.heappop(self._groups))
            else:
                self._simulate(*heapq.heappop(self._waiting)[1:])
        unplaced = sum(self._unplaced(each) for each in self._bounded)
        unrefined = sum(len(group.switches) for group in self._groups)
        self._rejected[Reason.BOUND] += unplaced + unrefined + len(self._waiting)
        return self._best

    def _limit(self) -> float:
        """Return the time that a layout has to beat."""
        return self._best[-1].step_s if len(self._best) == self._top else np.inf

    def _by_bound(self) -> Iterator[tuple[float, int, Place]]:
        """Yield the layouts that fit by their first bound, least first."""
        times = np.concatenate([each.bounds.time_s.ravel() for each in self._bounded] or [np.empty(0)])
        starts = np.cumsum([0, *(each.bounds.time_s.size for each in self._bounded)])
        order = np.argsort(times, kind="stable")
        for index in order[: int(np.isfinite(times).sum())].tolist():
            number = int(np.searchsorted(starts, index, side="right")) - 1
            shape = self._bounded[number].bounds.time_s.shape
            variant, b, switch = (int(i) for i in np.unravel_index(index - starts[number], shape))
            yield float(times[index]), number, (variant, b, switch)

    def _unplaced(self, each: BoundedGrid) -> int:
        left = np.isfinite(each.bounds.time_s)
        for variant, b in each.placed:
            left[variant, b] = False
        return int(left.sum())

    def _place(self, number: int, place: tuple[int, int]) -> None:
        """Bound the layouts of one schedule and micro-batch size by their cuts, once."""
        each = self._bounded[number]
        if place in each.placed:
            return
        each.placed.add(place)
        variant, b = place
        grid = each.grid
        alive = np.flatnonzero(np.isfinite(each.bounds.time_s[place])).tolist()
        microbatches = grid.microbatches(grid.microbatch[b])
        if grid.variants[variant].unit == "double" and microbatches <= grid.pipeline:
            # Doubling begins where a unit of p micro-batches ends.
            self._rejected[Reason.SAME] += len(alive)
            return
        switches = [s for s in alive if not (self._has_equal(each, s) and len(set(each.cut((variant, b, s)))) == 1)]
        self._rejected[Reason.SAME] += len(alive) - len(switches)
        if not switches:
            return
        times = placed(
            each.traits[variant],
            each.prices_of(variant, b).at(switches),
            each.cuts(variant, b, switches),
            chunks=grid.variants[variant].chunks or 1,
            microbatches=microbatches,
        )
        times = np.maximum(times, each.bounds.time_s[variant, b, switches])
        group = _Group(float(times.min()), number, variant, b, tuple(switches), tuple(times.tolist()))
        heapq.heappush(self._groups, group)

    def _refine(self, group: _Group) -> None:
        """Bound the layouts of one schedule and micro-batch size by the skeleton."""
        each = self._bounded[group.number]
        variant, b, switches = group.variant, group.b, list(group.switches)
        grid = each.grid
        try:
            found = skeleton(grid.variants[variant], grid.pipeline, grid.microbatches(grid.microbatch[b]))
        except UsageError:
            self._rejected[Reason.SCHEDULE] += len(switches)
            return
        prices = each.prices_of(variant, b).at(switches)
        cuts = each.cuts(variant, b, switches)
        bounds = tight(found, each.traits[variant], prices, cuts, chunks=grid.variants[variant].chunks or 1)
        fits = bounds.memory_bytes <= prices.usable_bytes
        self._rejected[Reason.MEMORY] += int((~fits).sum())
        for place in np.flatnonzero(fits).tolist():
            time = max(float(bounds.time_s[place]), group.times_s[place])
            heapq.heappush(self._waiting, (time, group.number, (variant, b, switches[place])))

    def _has_equal(self, each: BoundedGrid, switch: int) -> bool:
        """Return whether the grid has the equal cut beside this choice of another one."""
        chosen = each.grid.switches[switch]
        return each.alike and not chosen.equal and chosen._replace(equal=True) in each.grid.switches

    def _simulate(self, number: int, place: Place) -> None:
        """Estimate a layout in full and keep it where it is among the best."""
        estimate = self._pricing.estimate(self._bounded[number].layout(place))
        self.num_simulated += 1
        if not estimate.fits:
            self._rejected[Reason.MEMORY] += 1
            return
        self._best.append(estimate)
        self._best.sort(key=lambda one: one.step_s)
        if len(self._best) > self._top:
            self._best.pop()
            self._rejected[Reason.SLOWER] += 1
