"""Causes of idle gaps and critical paths: whole values on small programs, invariants on random ones."""

from itertools import pairwise

import numpy as np
import pytest
from simulate_oracle import random_schedule

from chimera.errors import ScheduleError
from chimera.ir.action import parse_instruction
from chimera.ir.costs import Costs
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.passes.lower import lower
from chimera.schedules import build_schedule
from chimera.simulate import Cause, critical_path, gaps, idle_by_cause, simulate

TWO_RANKS = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]])


def test_every_cause_is_named_with_the_action_and_rank_waited_for():
    """A lowered pair of ranks with messages and reductions shows all causes of a simulation."""
    costs = Costs(forward=1, backward=2, p2p=0.5, reduce=1)
    schedule = lower(TWO_RANKS)
    assert list(map(str, gaps(schedule, simulate(schedule, costs), costs))) == [
        "rank 0, 2 to 4.5: waiting for 1B0 on rank 1, before 0B0",
        "rank 0, 4.5 to 5: communication from 1B0 on rank 1, before 0B0",
        "rank 0, 7 to 7.5: waiting for 1B1 on rank 1, before 0B1",
        "rank 0, 7.5 to 8: communication from 1B1 on rank 1, before 0B1",
        "rank 0, 10 to 11: gradient reduction",
        "rank 1, 0 to 1.5: warm-up, before 1F0",
        "rank 1, 7.5 to 8.5: gradient reduction",
        "rank 1, 8.5 to 11: drain",
    ]


def test_compute_only_and_lowered_programs_have_the_same_gaps():
    """A message that is implied is told apart from its producer just as one with a span of its own."""
    costs = Costs(forward=1, backward=2, p2p=0.5)
    schedule = build_schedule("chimera", ranks=4, microbatches=8)
    lowered = lower(schedule, reduce=None)
    assert gaps(schedule, simulate(schedule, costs), costs) == gaps(lowered, simulate(lowered, costs), costs)


def test_a_step_that_waits_is_idle_for_its_reduction():
    """Between the last backward and STEP the rank waits for the gradients."""
    schedule = Schedule.from_text(["0F0 0B0 0REDUCE_GRAD 0STEP 0F1"], routes=[[0]], microbatch_to_route=[0, 0])
    (gap,) = gaps(schedule, simulate(schedule, Costs(reduce=4)))
    assert str(gap) == "rank 0, 3 to 7: gradient reduction, before 0STEP"


@pytest.mark.parametrize("seed", range(40))
def test_gaps_and_computations_fill_the_makespan_and_the_path_is_unbroken(seed):
    """Per rank, idle and busy add up to the makespan; the path's spans and messages add up to it as well."""
    schedule = random_schedule(seed)
    costs = Costs(forward=1.3, backward=2.9, p2p=0.7 * (seed % 2), reduce=1.7)
    if seed % 4 > 1:
        schedule = lower(schedule)
    timeline = simulate(schedule, costs)
    idle = idle_by_cause(gaps(schedule, timeline, costs), schedule.num_ranks)
    assert not idle[Cause.OVERHEAD].any()
    assert sum(idle.values()) + timeline.busy == pytest.approx(np.full(schedule.num_ranks, timeline.makespan))
    path = critical_path(schedule, timeline, costs)
    assert path[0].start == timeline.origin == 0
    assert path[-1].end == timeline.finish
    for before, after in pairwise(path):
        hop = after.start - before.end
        crosses = before.rank != after.rank and before.lane is after.lane is Lane.COMPUTE
        assert hop == pytest.approx(0.7 * (seed % 2) if crosses else 0.0, abs=1e-9)


def test_the_critical_path_of_1f1b_runs_down_and_up_the_pipeline():
    """The first forward goes down, the last rank works without pause, the last backward comes up."""
    schedule = build_schedule("1f1b", ranks=3, microbatches=3)
    path = critical_path(schedule, simulate(schedule))
    assert [str(span.action) for span in path] == [
        "0F0", "1F0", "2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "1B2", "0B2",
    ]  # fmt: skip


def test_the_critical_path_passes_through_a_collective():
    """A reduction that one rank reaches last is led back to that rank's work."""
    rows = ["0F0 0B0 0REDUCE_GRAD", "0F1 0F2 0B1 0B2 0REDUCE_GRAD"]
    schedule = Schedule.from_text(rows, routes=[[0], [1]], microbatch_to_route=[0, 1, 1])
    path = critical_path(schedule, simulate(schedule, Costs(reduce=2)))
    assert [(span.rank, str(span.action)) for span in path] == [
        (1, "0F1"),
        (1, "0F2"),
        (1, "0B1"),
        (1, "0B2"),
        (0, "0REDUCE_GRAD"),
    ]


def test_recorded_time_that_no_need_explains_is_overhead():
    """Rank 1 starts half a second after its data is there; with costs the message is told apart from that."""
    schedule = Schedule.from_text(["0F0 0F1", "1F0 1F1"], routes=[[0, 1]])
    spans = [(0, "0F0", 0, 1), (0, "0F1", 1.25, 3), (1, "1F0", 1.5, 2), (1, "1F1", 4, 5)]
    timeline = Timeline.from_spans(
        [(rank, Lane.COMPUTE, parse_instruction(text), start, end) for rank, text, start, end in spans], num_ranks=2
    )
    found = gaps(schedule, timeline, Costs(p2p=0.25))
    assert [(gap.rank, gap.start, gap.end, gap.cause) for gap in found] == [
        (0, 1, 1.25, Cause.OVERHEAD),
        (0, 3, 5, Cause.DRAIN),
        (1, 0, 1.5, Cause.WARM_UP),
        (1, 2, 3, Cause.WAITING),
        (1, 3, 3.25, Cause.COMMUNICATION),
        (1, 3.25, 4, Cause.OVERHEAD),
    ]
    assert [str(span.action) for span in critical_path(schedule, timeline)] == ["0F0", "0F1", "1F1"]


def test_a_timeline_of_another_schedule_is_refused():
    """Explaining one program by the timeline of another would name wrong causes."""
    with pytest.raises(ScheduleError, match="timeline 'gpipe' is not one of schedule 'text'"):
        gaps(TWO_RANKS, simulate(build_schedule("gpipe", ranks=2, microbatches=3)))


def test_an_empty_timeline_has_no_path_and_no_gap():
    """Nothing ran: nothing is idle, nothing is critical."""
    schedule = Schedule.from_text(["", ""], routes=[[0, 1]])
    timeline = simulate(schedule)
    assert (timeline.makespan, timeline.span, timeline.bubble_fraction, timeline.bubble_over_ideal) == (0, 0, 0, 0)
    assert gaps(schedule, timeline) == critical_path(schedule, timeline) == []
