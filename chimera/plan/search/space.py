"""What a search may choose from, and the grids of choices that the sizes of model, cluster and batch leave.

One grid holds all choices of one t and p: schedules × micro-batch sizes × switches. What cannot be is counted here, by
reason, in the same unit: layouts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import product
from typing import Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from chimera.errors import ConfigError, nearest_names
from chimera.plan.divisors import divisors
from chimera.plan.hardware import Cluster
from chimera.plan.layout import RECOMPUTES, Layout, Recompute
from chimera.plan.search.pricing import Choices
from chimera.plan.search.variants import Variant, variants
from chimera.plan.shape import ModelShape
from chimera.schedules import SCHEDULES

__all__ = ["ASYNCHRONOUS", "Grid", "Reason", "SearchSpace", "Switches", "grids"]

ASYNCHRONOUS: Final = frozenset({"pipedream", "pipedream-2bw"})
"""Schedules that step within themselves: they do not train like the others."""


_MODES: Final[tuple[Recompute, ...]] = get_args(Recompute)


class Reason(StrEnum):
    """Why a layout is not in the answer."""

    NODE = "with tensor-parallel groups over a node"
    HEADS = "with a t that does not divide the model's widths"
    STAGES = "with more stages than blocks"
    BATCH = "with a d that does not divide the batch"
    SCHEDULE = "of schedules that cannot take the sizes"
    SEARCHED = "with too many ranks to search an order for"
    EQUAL = "with stages that cannot have equal numbers of blocks"
    SAME = "the same as others"
    MEMORY = "that do not fit into memory"
    BOUND = "that cannot beat these, by their bounds"
    SLOWER = "simulated and slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Choices that are given; what is None is searched.

    Attributes:
        schedules: names; all synchronous ones.
        tensor: values of t.
        pipeline: values of p.
        data: values of d.
        microbatch: values of b.
        chunks: values of v, for schedules that take it.
        pairs: values of f, for schedules that take it.
        recompute: what the backward may run again.
        sequence_parallel: whether it may be on, off or either.
        sharded: whether optimizer states may be sharded, not, or either.
        uneven: whether stages may have different numbers of blocks, not, or either.

    Raises:
        ConfigError: an unknown schedule or mode, or a size below 1.
    """

    schedules: tuple[str, ...] | None = None
    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    pairs: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    sharded: tuple[bool, ...] | None = None
    uneven: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.schedules or ():
            if name not in self.all_schedules():
                raise ConfigError(
                    f"--schedules {name}: {_why_not(name)}{nearest_names(name, self.all_schedules())}; "
                    f"needed: {', '.join(self.all_schedules())}"
                )
        for mode in self.recompute or ():
            if mode not in RECOMPUTES:
                raise ConfigError(
                    f"--recompute {mode}: unknown{nearest_names(mode, RECOMPUTES)}; needed: {', '.join(RECOMPUTES)}"
                )
        for option in ("tensor", "pipeline", "data", "microbatch", "chunks", "pairs"):
            if any(size < 1 for size in getattr(self, option) or ()):
                raise ConfigError(f"--{option} {getattr(self, option)}: needed: whole numbers of at least 1")

    @staticmethod
    def all_schedules() -> tuple[str, ...]:
        """Return the names that a search tries where none is given."""
        return tuple(name for name, family in SCHEDULES.items() if name not in ASYNCHRONOUS and not family.takes_costs)

    @property
    def names(self) -> tuple[str, ...]:
        """Schedules that are tried."""
        return self.all_schedules() if self.schedules is None else self.schedules

    def takes(self, variant: Variant) -> bool:
        """Return whether a variant's sizes are among those that are given."""
        chunks, pairs = self.chunks or (variant.chunks,), self.pairs or (variant.pairs,)
        return variant.chunks in (None, *chunks) and variant.pairs in (None, *pairs)

    @property
    def given(self) -> Mapping[str, object]:
        """The choices that are not searched, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


class Switches(NamedTuple):
    """Choices that are on or off, or one of three."""

    recompute: int
    sequence_parallel: bool
    sharded: bool
    equal: bool


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """All layouts of one t and p: ``variants`` × ``microbatch`` × ``switches``, as [variant, b, switch]."""

    tensor: int
    pipeline: int
    data: int
    global_batch: int
    variants: tuple[Variant, ...]
    microbatch: tuple[int, ...]
    switches: tuple[Switches, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of its axes."""
        return len(self.variants), len(self.microbatch), len(self.switches)

    def microbatches(self, b: int) -> int:
        """Return m for micro-batches of ``b`` sequences."""
        return self.global_batch // (self.data * b)

    def choices(self, routes: Sequence[int]) -> Choices:
        """Return the choices over [route, b, switch] of schedules with so many routes."""
        columns = [np.array(column)[None, None, :] for column in zip(*self.switches, strict=True)]
        size = np.ones((1, 1, 1), np.int64)
        return Choices(
            tensor=size * self.tensor,
            pipeline=size * self.pipeline,
            data=size * self.data,
            microbatch=np.array(self.microbatch, np.int64)[None, :, None],
            routes=np.array(routes, np.int64)[:, None, None],
            recompute=columns[0],
            sequence_parallel=columns[1],
            sharded=columns[2],
        )

    def equal(self) -> NDArray[np.bool_]:
        """Return whether the cut is an equal one, over [b, switch]."""
        return np.array([[switch.equal for switch in self.switches]])

    def layout(self, place: tuple[int, int, int], cut: tuple[int, ...] | None) -> Layout:
        """Return the layout at [variant, b, switch] with this cut, or with the estimate's where it is None."""
        variant, size, switch = self.variants[place[0]], self.microbatch[place[1]], self.switches[place[2]]
        return Layout(
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=self.data,
            microbatch=size,
            microbatches=self.microbatches(size),
            schedule=variant.schedule,
            chunks=variant.chunks,
            pairs=variant.pairs,
            waves=variant.waves,
            unit=variant.unit,
            recompute=_MODES[switch.recompute],
            sequence_parallel=switch.sequence_parallel,
            sharded=switch.sharded,
            cut=cut,
        )


def grids(
    shape: ModelShape, cluster: Cluster, *, global_batch: int, space: SearchSpace, rejected: Counter[Reason]
) -> Iterator[Grid]:
    """Yield the grids that divide, t ascending; what does not is counted in ``rejected``."""
    devices = cluster.num_devices
    for tensor in space.tensor or divisors(devices):
        if tensor > shape.heads and space.tensor is None:
            continue  # nobody would ask for it: more ranks than heads
        for pipeline in space.pipeline or divisors(devices // tensor):
            if devices % (tensor * pipeline) or (data := devices // (tensor * pipeline)) not in (space.data or (data,)):
                continue
            found = tuple(each for each in variants(pipeline, shape.num_blocks, names=space.names) if space.takes(each))
            switches = _switches(cluster, tensor, pipeline, space)
            sizes = _microbatch_sizes(global_batch, data, space)
            count = len(found) * len(switches) * max(len(sizes), 1)
            if reason := _refusal(shape, cluster, tensor, pipeline, sizes):
                rejected[reason] += max(count, len(switches))
            elif count:
                yield Grid(tensor, pipeline, data, global_batch, found, sizes, switches)


def _refusal(shape: ModelShape, cluster: Cluster, tensor: int, pipeline: int, sizes: tuple[int, ...]) -> Reason | None:
    """Return why no layout of this t and p can be."""
    if cluster.node_size % tensor:
        return Reason.NODE
    if shape.undivided(tensor):
        return Reason.HEADS
    if pipeline > shape.num_blocks:
        return Reason.STAGES
    return None if sizes else Reason.BATCH


def _microbatch_sizes(global_batch: int, data: int, space: SearchSpace) -> tuple[int, ...]:
    """Return the b that make whole micro-batches on d replicas."""
    if global_batch % data:
        return ()
    return tuple(b for b in divisors(global_batch // data) if b in (space.microbatch or (b,)))


def _switches(cluster: Cluster, tensor: int, pipeline: int, space: SearchSpace) -> tuple[Switches, ...]:
    """Return all combinations of switches that differ from one another on such sizes.

    Sequence parallelism needs a tensor-parallel group. Sharding needs replicas, which Chimera has even without data
    parallelism; a pipeline of one rank has one cut.
    """
    modes = range(len(RECOMPUTES)) if space.recompute is None else sorted(map(RECOMPUTES.index, space.recompute))
    sequence = [on for on in (False, True) if on in (space.sequence_parallel or (False, True))]
    if tensor == 1:
        sequence = [False]
    sharded = [on for on in (False, True) if on in (space.sharded or (False, True))]
    if cluster.num_devices == tensor:
        sharded = [False]
    equal = [not on for on in (False, True) if on in (space.uneven or (False, True))]
    if pipeline == 1:
        equal = [True]
    return tuple(Switches(*each) for each in product(modes, sequence, sharded, equal))


def _why_not(schedule: str) -> str:
    """Return why a search does not try a schedule."""
    if schedule in ASYNCHRONOUS:
        return "steps within itself, so that it is no step of one update"
    if schedule in SCHEDULES:
        return "is made for given costs, as the orders are that refine the best plans"
    return "unknown"
