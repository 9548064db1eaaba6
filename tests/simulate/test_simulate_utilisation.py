"""What each rank made of a step, against sums by hand."""

import pytest

from chimera.ir.costs import Costs
from chimera.passes.lower import lower
from chimera.schedules import build_schedule
from chimera.simulate import Cause, rank_use, simulate, slowest_rank


def test_communication_is_exposed_where_a_rank_waits_for_it_alone():
    """Two ranks of 1F1B with messages of half a forward: in the steady state one hides behind the other's work."""
    schedule = lower(build_schedule("1f1b", ranks=2, microbatches=2), reduce=None)
    timeline = simulate(schedule, Costs(forward=1, backward=2, p2p=0.5))
    first, second = rank_use(schedule, timeline)
    # Rank 0: F 0-1, F 1-2, B 5-7 (waits for 1B0, 3.5 to 4.5, and its message), B 8-10: two gradients of half a unit.
    assert (first.busy, first.makespan) == (6.0, timeline.makespan)
    for use in (first, second):
        assert sum(use.idle.values()) == pytest.approx(use.makespan - use.busy)
        assert use.utilisation + use.bubble == pytest.approx(1.0)
    assert first.communication == pytest.approx(1.0)
    assert first.exposed == first.idle[Cause.COMMUNICATION]
    assert first.exposed + first.hidden == pytest.approx(first.communication)
    assert slowest_rank([first, second]) is first
