"""What a schedule says about any costs: critical paths as counts of computations, and activations held per rank.

The computations along a path of needs cannot overlap, whatever they take: their sum is a lower bound of the makespan
for *every* cost of stages and messages. The critical path of one simulation is the tightest such path where costs are
like the simulated ones. So a schedule is simulated once, for several typical ratios, and then bounds any number of
candidates as an array. It knows no model and no device.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.costs import StageCosts
from chimera.ir.memory import peak_activations
from chimera.ir.schedule import Placement, Schedule
from chimera.plan.cutting import holders
from chimera.plan.search.paths import counted_path
from chimera.plan.search.variants import Variant
from chimera.schedules import SCHEDULES
from chimera.simulate import simulate

__all__ = ["RankKind", "Skeleton", "Traits", "num_stages", "skeleton", "traits"]

_CACHED: Final = 20_000

_RATIOS: Final = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0))
"""Times of F, I and W that are simulated: a block without and with full recomputation."""

_HEAD: Final = 2**-4
_EMBEDDING: Final = 2**-7
"""By how much the last and the first stage take longer, so that of equal paths the one through the heavier wins."""

_HOP: Final = 2**-6

_FOLD_FROM: Final = 4
"""Steps of more micro-batches than so many times p are folded."""

_PERIOD: Final = 2
"""A steady state repeats after so many times p micro-batches: a unit of Chimera's doubling."""


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that hold the same stages' weights, by number.

    Attributes:
        stages: stages of a rank, over all routes.
        firsts: whether the first stage is among them, 0 or 1.
        lasts: whether the last stage is.
        peak_stages: most stages' activations that one of these ranks holds at once.
    """

    stages: int
    firsts: int
    lasts: int
    peak_stages: float


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """What a placement says, whatever the order and the number of micro-batches.

    Attributes:
        num_stages: stages of the model.
        routes: routes through the ranks.
        fill: stages that run before the rank that starts last can start.
        late: of such a rank, stages, and how many of them are the first and the last stage.
        whole: whether all backwards are whole, for any number of micro-batches: they keep a rank waiting for as long at
            the end as at the start.
        microbatches: of the step that the ranks' peaks are of.
        ranks: kinds of ranks.
        holders: for each stage, the ranks that hold it.
        holds: [rank, stage], whether a rank holds a stage's weights.
        first_stage: [rank], the earliest stage that it holds.
        hops_before: [rank], fewest messages on the way to such a rank.
        hops: fewest messages on the way through all stages.
    """

    num_stages: int
    routes: int
    fill: int
    late: tuple[int, int, int]
    whole: bool
    microbatches: int
    ranks: tuple[RankKind, ...]
    holders: tuple[tuple[int, ...], ...]
    holds: NDArray[np.bool_]
    first_stage: NDArray[np.int64]
    hops_before: NDArray[np.int64]
    hops: int


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """One schedule of one number of micro-batches, free of costs.

    Attributes:
        paths: [path, kind F I W, stage], computations of each path.
        hops: [path], messages on each path.
        peak_stages: [rank], most stages' activations that it holds at once.
    """

    paths: NDArray[np.float64]
    hops: NDArray[np.float64]
    peak_stages: NDArray[np.float64]


def num_stages(variant: Variant, ranks: int) -> int:
    """Return the stages, from a step of one micro-batch where that can be: one with too many is not built for more.

    Raises:
        UsageError: the schedule cannot take so many ranks.
    """
    if not SCHEDULES[variant.schedule].searched:  # the order of one micro-batch takes a search too
        with suppress(UsageError):
            return variant.build(ranks, 1).num_stages
    return traits(variant, ranks).num_stages


@lru_cache(maxsize=_CACHED)
def traits(variant: Variant, ranks: int) -> Traits:
    """Return the traits, with the peaks of the shortest step that fills the pipeline.

    Raises:
        UsageError: the schedule cannot take so many ranks.
    """
    try:
        schedule = variant.build(ranks, ranks)
    except UsageError:  # some need twice as many
        schedule = variant.build(ranks, 2 * ranks)
    # An order that is searched joins I and W by the number of micro-batches.
    splits = SCHEDULES[variant.schedule].searched or bool((schedule.table.kind == Kind.I).any())
    return _traits(schedule, whole=not splits)


@lru_cache(maxsize=_CACHED)
def skeleton(variant: Variant, ranks: int, microbatches: int) -> Skeleton:
    """Return the skeleton; a step of many micro-batches is folded.

    Of a folded step two shorter ones are simulated, which differ by one period; the paths of longer ones grow by what
    they differ in.

    Raises:
        UsageError: the schedule cannot take these sizes.
    """
    period = _PERIOD * ranks
    if microbatches <= _FOLD_FROM * ranks + period:
        return _of(variant.build(ranks, microbatches))
    short = period + microbatches % period
    base, one = (skeleton(variant, ranks, m) for m in (short, short + period))
    times = (microbatches - short) / period
    held, more = base.peak_stages, one.peak_stages - base.peak_stages
    if more.any():  # breadth-first schedules hold more with every period, unequal groups only until they are even
        third = _peak_stages(variant.build(ranks, short + 2 * period))
        held, more = (held, more) if np.allclose(third - one.peak_stages, more) else (one.peak_stages, 0.0 * more)
    return replace(
        one,
        paths=base.paths + times * (one.paths - base.paths),
        hops=base.hops + times * (one.hops - base.hops),
        peak_stages=held + times * more,
    )


def _of(schedule: Schedule) -> Skeleton:
    found = []
    for ratio in _RATIOS:
        timeline = simulate(schedule, _costs(schedule.num_stages, ratio), compiled=True)
        found.append(counted_path(schedule, timeline, _HOP))
    return Skeleton(
        paths=np.array([path for path, _ in found]),
        hops=np.array([hops for _, hops in found], np.float64),
        peak_stages=_peak_stages(schedule),
    )


def _peak_stages(schedule: Schedule) -> NDArray[np.float64]:
    """Return the most stages' activations that each rank holds at once."""
    return np.array(peak_activations(schedule)) * schedule.num_stages / schedule.num_ranks


def _traits(schedule: Schedule, *, whole: bool) -> Traits:
    placement = schedule.placement
    starts = [min(route.index(rank) for route in placement.routes) for rank in range(placement.num_ranks)]
    late = min(_stages(placement, rank) for rank, start in enumerate(starts) if start == max(starts))
    stages = range(placement.num_stages)
    holds = np.zeros((placement.num_ranks, placement.num_stages), np.bool_)
    hops_before = np.full(placement.num_ranks, placement.num_stages)
    routes = np.array(placement.routes)
    sent = np.pad((np.diff(routes) != 0).cumsum(axis=1), ((0, 0), (1, 0)))  # [route, stage], messages before it
    for ranks, before in zip(routes, sent, strict=True):
        holds[ranks, stages] = True
        np.minimum.at(hops_before, ranks, before)
    return Traits(
        num_stages=placement.num_stages,
        routes=len(placement.routes),
        fill=max(starts),
        late=late,
        whole=whole,
        microbatches=schedule.num_microbatches,
        ranks=_rank_kinds(schedule),
        holders=holders(placement),
        holds=holds,
        first_stage=holds.argmax(axis=1),
        hops_before=hops_before,
        hops=int(sent[:, -1].min()),
    )


def _costs(num_stages: int, ratio: tuple[float, float, float]) -> StageCosts:
    weight = np.ones(num_stages)
    weight[0] += _EMBEDDING
    weight[-1] += _HEAD
    forward, inward, outward = (time * weight for time in ratio)
    return StageCosts(
        forward_s=forward.tolist(),
        backward_s=(inward + outward).tolist(),
        weight_grad_s=outward.tolist(),
        latency_s=_HOP,
    )


def _rank_kinds(schedule: Schedule) -> tuple[RankKind, ...]:
    placement = schedule.placement
    peaks: dict[tuple[int, int, int], float] = {}
    for rank, peak in enumerate(_peak_stages(schedule).tolist()):
        key = _stages(placement, rank)
        peaks[key] = max(peaks.get(key, 0.0), peak)
    return tuple(RankKind(*key, peak) for key, peak in sorted(peaks.items()))


def _stages(placement: Placement, rank: int) -> tuple[int, int, int]:
    """Return how many stages a rank holds, and whether the first and the last are among them."""
    stages = placement.stages_on(rank)
    return len(stages), int(0 in stages), int(placement.num_stages - 1 in stages)
