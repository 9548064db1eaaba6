"""Grids of layouts with their bounds, and of them the one with the least memory.

Bounds are made for whole grids of choices at once, from the placements of their schedules. What cannot be, or does not
fit by its bound, is counted by reason here; in which order the rest is looked at is ``searching``'s business.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.errors import UsageError
from chimera.plan.cutting import cut_by_cost, equal_cut
from chimera.plan.estimate import Estimate
from chimera.plan.hardware import Cluster
from chimera.plan.layout import Layout
from chimera.plan.search.bounds import Bounds, quick
from chimera.plan.search.pricing import Prices, Pricing
from chimera.plan.search.skeleton import Traits, num_stages, traits
from chimera.plan.search.space import Grid, Reason, SearchSpace, grids
from chimera.plan.search.variants import MAX_SEARCHED_RANKS
from chimera.plan.shape import ModelShape
from chimera.schedules import SCHEDULES

__all__ = ["BoundedGrid", "Place", "bounded_grids", "closest", "least_bytes", "prices_by_routes"]

_CANDIDATES: Final = 24
"""Layouts with the least memory by their bounds that are estimated, if none fits."""

Place = tuple[int, int, int]
"""Of a layout in its grid: variant, b, switch."""


@dataclass(slots=True, eq=False)
class BoundedGrid:
    """A grid with its bounds; an infinite time is of a layout that is out.

    Attributes:
        grid: the choices.
        num_blocks: of the model.
        alike: whether all its blocks are.
        traits: [variant].
        prices: over [b, switch], for each number of routes.
        bounds: over [variant, b, switch].
        placed: [variant, b] whose cuts have been made.
    """

    grid: Grid
    num_blocks: int
    alike: bool
    traits: tuple[Traits, ...]
    prices: Mapping[int, Prices]
    bounds: Bounds
    placed: set[tuple[int, int]] = field(default_factory=set)
    _cuts: dict[tuple[int, float, float], tuple[int, ...]] = field(default_factory=dict)

    def prices_of(self, variant: int, b: int) -> Prices:
        """Return the prices over [switch]."""
        return self.prices[self.traits[variant].routes].at(b, slice(None))

    def cut(self, place: Place) -> tuple[int, ...]:
        """Return the blocks of each stage of a layout."""
        variant, b, switch = place
        known = self.traits[variant]
        if self.grid.switches[switch].equal:
            cut = equal_cut(self.num_blocks, known.num_stages)
            assert cut is not None, "an equal cut that does not divide was left in the grid"
            return cut
        prices = self.prices_of(variant, b)
        block = float(prices.block_s[:, switch].sum())
        embedding, head = (float(part[:, switch].sum()) / block for part in (prices.embedding_s, prices.head_s))
        key = (variant, embedding, head)  # switches that change memory alone have one cut
        if key not in self._cuts:
            self._cuts[key] = cut_by_cost(self.num_blocks, known.holders, embedding=embedding, head=head)
        return self._cuts[key]

    def cuts(self, variant: int, b: int, switches: Sequence[int]) -> NDArray[np.int64]:
        """Return the cuts over [switch, stage]."""
        return np.array([self.cut((variant, b, switch)) for switch in switches], np.int64)

    def layout(self, place: Place) -> Layout:
        """Return the layout at a place.

        Of blocks that are alike, the estimate's own cut is the equal one; of two stacks, the one by their costs.
        """
        estimated = self.grid.switches[place[2]].equal == self.alike
        return self.grid.layout(place, None if estimated else self.cut(place))


def bounded_grids(
    shape: ModelShape,
    cluster: Cluster,
    pricing: Pricing,
    *,
    global_batch: int,
    space: SearchSpace,
    rejected: Counter[Reason],
) -> list[BoundedGrid]:
    """Return the grids of a space with their bounds; what is out is counted in ``rejected``."""
    found = grids(shape, cluster, global_batch=global_batch, space=space, rejected=rejected)
    return [each for grid in found if (each := _bound(shape, grid, pricing, rejected)) is not None]


def least_bytes(
    shape: ModelShape, cluster: Cluster, pricing: Pricing, *, global_batch: int, space: SearchSpace
) -> float:
    """Return the least memory that a layout needs, estimated in full; infinite where there is no layout."""
    found = bounded_grids(shape, cluster, pricing, global_batch=global_batch, space=space, rejected=Counter())
    least = closest(pricing, found)
    return np.inf if least is None else least.peak_bytes


def prices_by_routes(pricing: Pricing, grid: Grid, known: Sequence[Traits]) -> Mapping[int, Prices]:
    """Return the prices of a grid over [b, switch], for each number of routes that its schedules have."""
    routes = sorted({each.routes for each in known})
    prices = pricing.prices(grid.choices(routes))
    return {count: prices.at(place, slice(None), slice(None)) for place, count in enumerate(routes)}


def _bound(shape: ModelShape, grid: Grid, pricing: Pricing, rejected: Counter[Reason]) -> BoundedGrid | None:
    """Bound a grid from the placements of its schedules; those that cannot take p are left out."""
    known: list[Traits] = []
    kept = []
    each = len(grid.microbatch) * len(grid.switches)
    for variant in grid.variants:
        if SCHEDULES[variant.schedule].searched and grid.pipeline > MAX_SEARCHED_RANKS:
            rejected[Reason.SEARCHED] += each
            continue
        try:
            if num_stages(variant, grid.pipeline) > shape.num_blocks:
                rejected[Reason.STAGES] += each
                continue
            known.append(traits(variant, grid.pipeline))
        except UsageError:
            rejected[Reason.SCHEDULE] += each
            continue
        kept.append(variant)
    if not kept:
        return None
    grid = replace(grid, variants=tuple(kept))
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
    # Replicas of one have nothing to share; the layout stands beside as one that does not share.
    sharded = grid.choices([1]).sharded
    shared = np.array([[[each.routes * grid.data > 1]] for each in known]) | ~sharded | bool(sharded.all())
    divides, shared = (np.broadcast_to(each, bounds.time_s.shape) for each in (divides, shared))
    possible = divides & shared
    fits = bounds.memory_bytes <= usable
    rejected[Reason.EQUAL] += int((~divides).sum())
    rejected[Reason.SAME] += int((divides & ~shared).sum())
    rejected[Reason.MEMORY] += int((possible & ~fits).sum())
    time = np.where(possible & fits, bounds.time_s, np.inf)
    return BoundedGrid(
        grid=grid,
        num_blocks=shape.num_blocks,
        alike=not shape.encoder_layers,
        traits=tuple(known),
        prices=by_routes,
        bounds=Bounds(time, np.where(possible, bounds.memory_bytes, np.inf)),
    )


def closest(pricing: Pricing, bounded: Sequence[BoundedGrid]) -> Estimate | None:
    """Return, of the layouts with the least memory by their bounds, the one that needs least; None without any."""
    found: list[tuple[float, int, Place]] = []
    for number, each in enumerate(bounded):
        memory = each.bounds.memory_bytes
        for index in np.argsort(memory, axis=None)[:_CANDIDATES].tolist():
            variant, b, switch = (int(i) for i in np.unravel_index(index, memory.shape))
            if np.isfinite(memory[variant, b, switch]):
                found.append((float(memory[variant, b, switch]), number, (variant, b, switch)))
    estimates = []
    for _, number, place in sorted(found)[:_CANDIDATES]:
        with suppress(UsageError):  # a schedule that cannot take so few micro-batches
            estimates.append(pricing.estimate(bounded[number].layout(place)))
    return min(estimates, key=lambda one: one.peak_bytes, default=None)
