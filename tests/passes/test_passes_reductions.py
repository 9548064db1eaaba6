"""Placement of gradient reductions in the paper's three ways."""

import pytest

from chimera.errors import ScheduleError, UsageError
from chimera.ir.action import Kind, flatten
from chimera.ir.schedule import Schedule
from chimera.passes.communication import add_communication
from chimera.passes.reductions import place_reductions
from chimera.schedules.registry import build_schedule

CHIMERA = build_schedule("chimera", ranks=4, microbatches=4)


def without_computations_before(row):
    """Return a row's text from its first reduction on."""
    return row[row.index("REDUCE") - 1 :]


def test_at_the_end_they_follow_the_last_computation():
    """Mode end: the later stage first on every rank."""
    assert place_reductions(CHIMERA, "end").to_text() == [
        "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1 3REDUCE_GRAD 0REDUCE_GRAD",
        "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1 2REDUCE_GRAD 1REDUCE_GRAD",
        "1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3 2REDUCE_GRAD 1REDUCE_GRAD",
        "0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3 3REDUCE_GRAD 0REDUCE_GRAD",
    ]


def test_eager_ones_follow_the_last_gradient_of_their_stage():
    """Mode eager: as soon as the rank has the stage's last gradient, also on the middle stages."""
    rows = [without_computations_before(row) for row in place_reductions(CHIMERA, "eager").to_text()]
    assert rows == [
        "3REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD",
        "2REDUCE_GRAD 1B1 1REDUCE_GRAD",
        "2REDUCE_GRAD 1B3 1REDUCE_GRAD",
        "3REDUCE_GRAD 0B2 0B3 0REDUCE_GRAD",
    ]


def test_eager_opt_ones_are_eager_only_where_a_bubble_follows():
    """Mode eager-opt: the middle ranks have no idle slot left, so theirs wait for the end (SC'21, section 3.2)."""
    rows = [without_computations_before(row) for row in place_reductions(CHIMERA, "eager-opt").to_text()]
    assert rows == [
        "3REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD",
        "2REDUCE_GRAD 1REDUCE_GRAD",
        "2REDUCE_GRAD 1REDUCE_GRAD",
        "3REDUCE_GRAD 0B2 0B3 0REDUCE_GRAD",
    ]


@pytest.mark.parametrize("ranks", [4, 6, 8, 12, 16])
def test_only_the_two_middle_ranks_wait_in_chimera(ranks):
    """After the first-finished replica there are p/2 − 1 − r interior idle slots: none on the middle two only."""
    schedule = place_reductions(build_schedule("chimera", ranks=ranks, microbatches=ranks), "eager-opt")
    together = [
        [action.kind for action in flatten(program)][-2:] == [Kind.REDUCE_GRAD] * 2 for program in schedule.actions
    ]
    assert [rank for rank, waits in enumerate(together) if waits] == [ranks // 2 - 1, ranks // 2]


def test_shared_reductions_keep_one_order_where_ranks_finish_in_different_ones():
    """Each rank finishes another of two shared stages first; both start the reductions in the same order."""
    rows = ["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"]
    crossed = Schedule.from_text(rows, routes=[[0, 1], [1, 0]], microbatch_to_route=[0, 1])
    uneven = Schedule.from_text(
        ["0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", "0F2 1F2 1B2 0B2 0F3 1F3 1B3 0B3"],
        routes=[[0, 0], [1, 1]],
        microbatch_to_route=[0, 0, 1, 1],
    )
    for schedule in (crossed, uneven):
        orders = [
            [action.stage for action in flatten(program) if action.kind is Kind.REDUCE_GRAD]
            for program in place_reductions(schedule, "eager").actions
        ]
        assert orders == [[1, 0], [1, 0]]


def test_a_replica_that_no_microbatch_uses_is_reduced_too():
    """With fewer micro-batches than routes, the unused replicas still take part."""
    schedule = build_schedule("chimera", ranks=2, microbatches=1)
    assert place_reductions(schedule, "end").to_text() == [
        "0F0 0B0 1REDUCE_GRAD 0REDUCE_GRAD",
        "1F0 1B0 1REDUCE_GRAD 0REDUCE_GRAD",
    ]
    for mode in ("eager", "eager-opt"):
        assert sorted(map(len, place_reductions(schedule, mode).actions)) == [4, 4]


def test_reductions_of_a_lowered_schedule_do_not_hold_up_its_sends():
    """Placed into a lowered program, an eager reduction stands behind the send of the same gradient."""
    straight = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]])
    assert place_reductions(add_communication(straight), "eager").to_text() == [
        "0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
    ]


def test_a_pair_and_a_split_backward_end_where_they_end():
    """The last gradient is a W where the backward is split, and a pair is passed as a whole."""
    rows = ["0F0 (0F1;0I0)OVERLAP_F_B 0W0 0I1 0W1"]
    assert place_reductions(Schedule.from_text(rows, routes=[[0]]), "eager").to_text() == [f"{rows[0]} 0REDUCE_GRAD"]
    rows = ["0F0 1F0 1B0 (1F1;0B0)OVERLAP_F_B 1B1", "0F1 0B1"]
    schedule = Schedule.from_text(rows, routes=[[0, 0], [1, 0]], microbatch_to_route=[0, 1])
    assert place_reductions(schedule, "eager").to_text() == [
        "0F0 1F0 1B0 (1F1;0B0)OVERLAP_F_B 1B1 1REDUCE_GRAD 0REDUCE_GRAD",
        "0F1 0B1 0REDUCE_GRAD",
    ]


@pytest.mark.parametrize("mode", ["end", "eager", "eager-opt"])
def test_an_asynchronous_schedule_reduces_before_every_update(mode):
    """Each STEP gets the reduction of its stage directly before it."""
    rows = ["0F0 0F1 0B0 0STEP 0B1 0STEP", "1F0 1B0 1STEP 1F1 1B1 1STEP"]
    assert place_reductions(Schedule.from_text(rows, routes=[[0, 1]]), mode).to_text() == [
        "0F0 0F1 0B0 0REDUCE_GRAD 0STEP 0B1 0REDUCE_GRAD 0STEP",
        "1F0 1B0 1REDUCE_GRAD 1STEP 1F1 1B1 1REDUCE_GRAD 1STEP",
    ]


def test_wrong_requests_are_refused():
    """An unknown mode is met with the nearest, reductions that are there are not placed twice."""
    with pytest.raises(UsageError, match=r"got mode 'eager_opt' \(did you mean 'eager-opt' or 'eager'\?\)"):
        place_reductions(CHIMERA, "eager_opt")
    with pytest.raises(ScheduleError, match="places its reductions itself"):
        place_reductions(place_reductions(CHIMERA, "end"), "end")
