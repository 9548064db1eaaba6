"""A step of many micro-batches from two steps of few: the steady state is simulated once and repeated.

Behind the warm-up every schedule of the registry repeats itself after at most 2p micro-batches, so its makespan, idle
time and peaks grow by the same amount with every 2p more. Two short simulations give that amount; ``simulate`` knows
nothing of it. Where m is small the step is simulated whole. A schedule that runs ahead can hide a heavy rank for many
periods: as long as the step grows by less than its busiest rank does, longer ones are simulated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.simulate.simulator import CostModel, simulate

__all__ = ["Step", "folded_step", "simulated_step"]

_WARM_PERIODS: Final = 2
"""Periods of 2p micro-batches that are simulated before the first one that counts as steady; twice as many and so on
where that one turns out not to be."""

_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a simulated step comes to.

    Attributes:
        makespan: first start to last end over all ranks.
        compute_end: from the first start to the last end of a computation.
        busy: [rank], time in which it computes.
        peak_activations: [rank], in units of 1/p of the model for one micro-batch.
        peak_bytes: [rank], of activations and what is resident; the activations alone where nothing resident is given.
        timeline: of the step, or of the shorter one that stands for it.
        schedule: that ``timeline`` ran.
    """

    makespan: float
    compute_end: float
    busy: NDArray[np.float64]
    peak_activations: NDArray[np.float64]
    peak_bytes: NDArray[np.float64]
    timeline: Timeline
    schedule: Schedule


def simulated_step(schedule: Schedule, costs: CostModel, *, compiled: bool | None = None) -> Step:
    """Simulate a step whole; ``compiled`` as in ``simulate``."""
    timeline = simulate(schedule, costs, compiled=compiled)
    computes = timeline.lane == Lane.COMPUTE
    end = float(timeline.end[computes].max()) - timeline.origin
    peaks = timeline.peak_bytes
    return Step(
        makespan=timeline.makespan,
        compute_end=end,
        busy=timeline.busy,
        peak_activations=np.array(timeline.peak_activations),
        peak_bytes=np.zeros(schedule.num_ranks) if peaks is None else np.array(peaks),
        timeline=timeline,
        schedule=schedule,
    )


def folded_step(
    build: Callable[[int], Schedule], microbatches: int, costs: CostModel, *, ranks: int, compiled: bool | None = None
) -> Step:
    """Return the step of ``microbatches``, simulating 6p of them, or more where the steady state begins later.

    Args:
        build: gives the schedule of a number of micro-batches.
        microbatches: m.
        costs: of the stages.
        ranks: p.
        compiled: as in ``simulate``.
    """
    period = 2 * ranks
    periods, rest = divmod(microbatches, period)
    warm = _WARM_PERIODS
    while periods > warm + 1:
        shorter = simulated_step(build(warm * period + rest), costs, compiled=compiled)
        longer = simulated_step(build((warm + 1) * period + rest), costs, compiled=compiled)
        busiest = float((longer.busy - shorter.busy).max())
        if longer.compute_end - shorter.compute_end >= busiest * (1 - _ROUNDING):
            return _extended(shorter, longer, periods - warm - 1)
        warm *= 2
    return simulated_step(build(microbatches), costs, compiled=compiled)


def _extended(shorter: Step, longer: Step, more: int) -> Step:
    """Return ``longer`` with ``more`` periods, each of which adds what it has beyond ``shorter``."""
    return Step(
        makespan=longer.makespan + more * (longer.makespan - shorter.makespan),
        compute_end=longer.compute_end + more * (longer.compute_end - shorter.compute_end),
        busy=longer.busy + more * (longer.busy - shorter.busy),
        peak_activations=longer.peak_activations + more * (longer.peak_activations - shorter.peak_activations),
        peak_bytes=longer.peak_bytes + more * (longer.peak_bytes - shorter.peak_bytes),
        timeline=longer.timeline,
        schedule=longer.schedule,
    )
