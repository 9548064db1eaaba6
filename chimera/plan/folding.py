"""A step of many micro-batches from steps of few: the steady state is simulated once and repeated.

Behind the warm-up every schedule of the registry repeats itself after at most 2p micro-batches, so its makespan, idle
time and peaks grow by the same amount with every 2p more. Two short simulations give that amount; ``simulate`` knows
nothing of it. Where m is small the step is simulated whole.

The steady state may begin late. A schedule that runs ahead can hide a heavy rank for many periods: as long as the step
grows by less than its busiest rank does, longer ones are simulated. Groups of unequal length, which ``interleaved``
makes of an m that p does not divide, even out as m grows: where a step grows by more than its busiest rank, or holds
more with every period, a third simulation has to find the same growth.
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

_SAME_GROWTH: Final = 1e-4
"""Share by which two periods may differ and count as equal: a tenth of the error that folding may have."""

_MOST_PERIODS: Final = 128
"""Periods behind which what still varies is a share of the step too small to count."""


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

    def of(some: int) -> Step:
        return simulated_step(build(some * period + rest), costs, compiled=compiled)

    warm = _WARM_PERIODS
    while periods > warm + 1:
        shorter, longer = of(warm), of(warm + 1)
        busiest = float((longer.busy - shorter.busy).max())
        growth = longer.compute_end - shorter.compute_end
        if growth >= busiest * (1 - _ROUNDING):
            if warm >= _MOST_PERIODS or (growth <= busiest * (1 + _ROUNDING) and _same_peaks(shorter, longer)):
                return _extended(shorter, longer, periods - warm - 1)
            if periods > warm + 2 and _grows_evenly(shorter, longer, longest := of(warm + 2)):
                return _extended(longer, longest, periods - warm - 2)
        warm *= 2
    return simulated_step(build(microbatches), costs, compiled=compiled)


def _same_peaks(shorter: Step, longer: Step) -> bool:
    return bool(np.array_equal(shorter.peak_bytes, longer.peak_bytes)) and bool(
        np.array_equal(shorter.peak_activations, longer.peak_activations)
    )


def _grows_evenly(shorter: Step, longer: Step, longest: Step) -> bool:
    """Return whether two periods that follow one another add the same time and the same peaks."""
    first, second = longer.compute_end - shorter.compute_end, longest.compute_end - longer.compute_end
    peaks = [np.append(step.peak_bytes, step.peak_activations) for step in (shorter, longer, longest)]
    return abs(second - first) <= _SAME_GROWTH * first and bool(
        np.allclose(peaks[1] - peaks[0], peaks[2] - peaks[1], rtol=_ROUNDING, atol=_ROUNDING * peaks[2].max())
    )


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
