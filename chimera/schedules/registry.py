"""The published schedules by name: what each is, what it needs, what it costs, and how it is built.

A new schedule is one pure function and one row here. The registry knows no orders and no costs; formulas are text for
people, and tests hold them against the simulator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from chimera.errors import UsageError, nearest_names
from chimera.ir.schedule import Schedule
from chimera.schedules.building import require_counts
from chimera.schedules.chimera import chimera
from chimera.schedules.gpipe import gpipe
from chimera.schedules.interleaved import interleaved
from chimera.schedules.one_f_one_b import one_f_one_b

__all__ = ["SCHEDULES", "ScheduleFamily", "build_schedule"]


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """One published schedule.

    ``options`` are the names that ``build`` takes besides ``ranks`` and ``microbatches``. In the texts p is ranks, m
    micro-batches, v chunks per rank, f pairs; activations are in units of 1/p of the model for one micro-batch.
    """

    name: str
    summary: str
    source: str
    requires: str
    bubble: str
    memory: str
    options: tuple[str, ...]
    build: Callable[..., Schedule]


_FAMILIES = (
    ScheduleFamily(
        name="gpipe",
        summary="all forwards, then all backwards",
        source="Huang et al., GPipe, NeurIPS 2019 (arXiv 1811.06965), §2.3",
        requires="any p, any m",
        bubble="(p−1)/(m+p−1) of total, (p−1)/m of ideal",
        memory="weights 1, activations m",
        options=(),
        build=gpipe,
    ),
    ScheduleFamily(
        name="1f1b",
        summary="one forward, one backward in turn, with a flush at the end of the step (DAPPLE, PipeDream-Flush)",
        source="Narayanan et al., SC 2021 (arXiv 2104.04473), §2.2.1",
        requires="any p, any m",
        bubble="(p−1)/(m+p−1) of total, (p−1)/m of ideal",
        memory="weights 1, activations min(m, p−rank)",
        options=(),
        build=one_f_one_b,
    ),
    ScheduleFamily(
        name="interleaved",
        summary="1F1B over v model chunks per rank, so that filling and draining take 1/v of the time",
        source="Narayanan et al., SC 2021 (arXiv 2104.04473), §2.2.2",
        requires="any p, m and v ≥ 1 (v is 2 when not given); v = 1 is 1f1b",
        bubble="(p−1)/(v·m+p−1) of total, (p−1)/(v·m) of ideal, for m ≥ p with m mod p ≤ p/2",
        memory="weights 1, activations at most p + (p−1)/v for m a multiple of p",
        options=("chunks",),
        build=interleaved,
    ),
    ScheduleFamily(
        name="chimera",
        summary="f pairs of pipelines in opposite directions over the same ranks",
        source="Li and Hoefler, SC 2021 (arXiv 2107.06925), §3",
        requires="p even, f divides p/2, any m; unit concatenate, double or halve",
        bubble="(p−2f)/(2fm+p−2f) of total for F = B; (p−2)/(3m/2+p−2) of total for B = 2F, f = 1, m = p",
        memory="weights 2f, activations p−p/(2f)+1 … p for m = p; up to 2p with unit double",
        options=("pairs", "unit"),
        build=chimera,
    ),
)

SCHEDULES: Final[Mapping[str, ScheduleFamily]] = MappingProxyType({family.name: family for family in _FAMILIES})
"""Every schedule that can be built, by name."""


def build_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    pairs: int | None = None,
    unit: str | None = None,
) -> Schedule:
    """Build a schedule by name; an option left out takes the default of the schedule.

    >>> build_schedule("chimera", ranks=8, microbatches=16, pairs=2).num_stages
    8
    >>> build_schedule("gpipe", ranks=4, microbatches=8, chunks=2)
    Traceback (most recent call last):
    chimera.errors.UsageError: gpipe takes no --chunks, got 2; leave it out, or choose a schedule that takes it: \
interleaved

    Args:
        name: a key of ``SCHEDULES``.
        ranks: pipeline ranks p.
        microbatches: micro-batches m per step, over all routes.
        chunks: model chunks v per rank.
        pairs: pairs of opposite pipelines f.
        unit: how Chimera makes a step of more than p micro-batches.

    Raises:
        UsageError: the name is unknown, the schedule does not take an option, or it cannot take a value; the message
            gives the nearest ones.
    """
    family = SCHEDULES.get(name)
    if family is None:
        raise UsageError(
            f"no schedule is named {name!r}{nearest_names(name, SCHEDULES)}; known: {', '.join(SCHEDULES)}"
        )
    require_counts(name, ranks=ranks, microbatches=microbatches)
    given = {"chunks": chunks, "pairs": pairs, "unit": unit}
    options = {option: value for option, value in given.items() if value is not None}
    for option, value in options.items():
        if option not in family.options:
            takers = ", ".join(other.name for other in _FAMILIES if option in other.options)
            raise UsageError(
                f"{name} takes no --{option}, got {value}; leave it out, or choose a schedule that takes it: {takers}"
            )
    return family.build(ranks, microbatches, **options)
