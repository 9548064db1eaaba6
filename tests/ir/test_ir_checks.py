"""The proof of compute-only schedules, its findings compared as whole values."""

from dataclasses import replace

import pytest

from chimera.errors import ScheduleError
from chimera.ir.action import Action, Kind, Overlap
from chimera.ir.checks import Violation, check, violations
from chimera.ir.schedule import Placement, Schedule

STRAIGHT = [[0, 1]]
CROSSED = [[0, 1], [1, 0]]


def found(rows, routes=STRAIGHT, microbatch_to_route=None, **options):
    """Return the violations of a schedule in text form as (rank, position, action, rule)."""
    schedule = Schedule.from_text(rows, routes=routes, microbatch_to_route=microbatch_to_route)
    return [(v.rank, v.position, v.action, v.rule) for v in violations(schedule, **options)]


@pytest.mark.parametrize(
    ("rows", "routes", "microbatch_to_route"),
    [
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], STRAIGHT, None),
        (["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1B0 1F1 1I1 1W1"], STRAIGHT, None),
        (["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"], CROSSED, [0, 1]),
        (["0F0 0F1 0B0 0B1 0REDUCE_GRAD", "1F0 1B0 1F1 1B1 1REDUCE_GRAD"], STRAIGHT, None),
        (["0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1"], [[0, 0]], None),
        (["0F0 (0F1;0B0)OVERLAP_F_B 0B1"], [[0]], None),
        (["0F0 0B0 0STEP 0F1 0B1 0STEP"], [[0]], None),
        (["0F0 0B0", "1F0 1B0", ""], [[0, 1]], None),
    ],
)
def test_sound_schedules_are_proved(rows, routes, microbatch_to_route):
    """Schedules that are complete and in order have no violation."""
    assert found(rows, routes, microbatch_to_route) == []


def test_numbers_out_of_range_are_named():
    """Stages and micro-batches beyond the schedule's, and whole-stage actions with a micro-batch, are shape errors."""
    programs = ((Action(Kind.F, 2, 0), Action(Kind.B, 0, 1), Action(Kind.STEP, 0, 0), Action(Kind.F, 0, None)),)
    schedule = Schedule("hand", Placement(1, ((0,),)), (0,), programs)
    assert violations(schedule) == [
        Violation(0, 0, "2F0", "there is no such stage; needed: a stage in 0…0", "shape"),
        Violation(0, 2, "0STEP0", "it concerns the whole stage; leave the micro-batch out", "shape"),
        Violation(0, 1, "0B1", "there is no such micro-batch; needed: a micro-batch in 0…0", "shape"),
        Violation(0, 3, "0F", "there is no such micro-batch; needed: a micro-batch in 0…0", "shape"),
    ]


def test_a_pair_of_the_wrong_kinds_is_named():
    """Only a forward followed by a backward makes a pair."""
    pair = Overlap(Action(Kind.B, 0, 0), Action(Kind.F, 0, 0))
    schedule = Schedule("hand", Placement(1, ((0,),)), (0,), ((pair,),))
    assert [(v.action, v.rule) for v in violations(schedule)] == [("(0B0;0F0)OVERLAP_F_B", "shape")]


def test_the_wrong_rank_is_named():
    """An action, with or without a micro-batch, that its placement puts elsewhere is an error at its place."""
    rows = ["0F0 1F0 1B0 0B0 1REDUCE_GRAD", ""]
    assert found(rows) == [(0, 1, "1F0", "placement"), (0, 2, "1B0", "placement"), (0, 4, "1REDUCE_GRAD", "placement")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 0F1 0B0", [(0, 3, "0B1", "complete")]),
        ("0F0 0B0 0B1", [(0, 3, "0F1", "complete")]),
        ("0F0 0F1 0B0 0B1 0F1", [(0, 4, "0F1", "complete")]),
        ("0F0 0F1 0B0 0I1", [(0, 4, "0W1", "complete")]),
        ("0F0 0F1 0B0 0W1", [(0, 4, "0I1", "complete")]),
        ("0F0 0F1 0B0 0B1 0W1", [(0, 4, "0W1", "complete")]),
        ("0F0 0F1 0B0 0B1 0I1 0W1", [(0, 4, "0I1", "complete")]),
        ("0F0 0F1 0I0 0W0 0W0 0B1", [(0, 4, "0W0", "complete")]),
    ],
)
def test_missing_repeated_and_mixed_computations_are_named(row, expected):
    """Each (stage, micro-batch) has one F and one B, or one I and one W."""
    assert found([row], [[0]], [0, 0]) == expected


def test_a_forward_only_program_has_no_backward():
    """With forward_only each forward is there once and any gradient is one too many."""
    assert found(["0F0 0F1", "1F0 1F1"], forward_only=True) == []
    assert found(["0F0 0F1 0B1", "1F0"], forward_only=True) == [(0, 2, "0B1", "complete"), (1, 1, "1F1", "complete")]
    assert found(["0F0", "1F0"]) == [(0, 1, "0B0", "complete"), (1, 1, "1B0", "complete")]


def test_a_schedule_without_microbatches_is_refused():
    """Nothing to do is not complete."""
    assert found([""], [[0]]) == [(0, 0, "program", "complete")]


def test_a_few_actions_that_claim_billions_are_refused_at_once():
    """Claimed stages × micro-batches beyond what is listed never get memory of that size."""
    placement = Placement(1, ((0,) * 50_000,))
    schedule = Schedule("claims", placement, (0,) * 50_000, ((Action(Kind.F, 0, 0),),))
    (violation,) = violations(schedule)
    assert violation.message == (
        "has 1 of the 2500000000 forward computations of 50000 stages × 50000 micro-batches; add the missing ones or "
        "correct the counts"
    )


@pytest.mark.parametrize(
    ("row", "routes", "expected"),
    [
        ("0B0 0F0", [[0]], (0, 0, "0B0", "order")),
        ("0F0 0W0 0I0", [[0]], (0, 1, "0W0", "order")),
        ("1F0 0F0 1B0 0B0", [[0, 0]], (0, 0, "1F0", "order")),
        ("0F0 1F0 0B0 1B0", [[0, 0]], (0, 2, "0B0", "order")),
        ("(0F0;0B0)OVERLAP_F_B", [[0]], (0, 0, "0B0", "order")),
    ],
)
def test_what_a_rank_needs_from_itself_stands_before(row, routes, expected):
    """A need met on the same rank is checked by position; the halves of a pair do not feed each other."""
    assert found([row], routes) == [expected]


def test_a_deadlock_is_told_as_the_cycle_action_by_action():
    """Each rank of the cycle says what it waits for, and where that rank is stuck itself."""
    schedule = Schedule.from_text(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], routes=STRAIGHT, name="knot")
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert str(error.value) == (
        "schedule 'knot' has 2 violations:\n"
        "  rank 0, position 1, 0B0: waits for 1B0 of rank 1 at position 3, but rank 1 is itself waiting at position 0 "
        "(1F1): a cycle of 2 ranks; reorder one of them\n"
        "  rank 1, position 0, 1F1: waits for 0F1 of rank 0 at position 2, but rank 0 is itself waiting at position 1 "
        "(0B0): a cycle of 2 ranks; reorder one of them\n"
        "position  0             1             2    3\n"
        "rank 0    0F0           0B0 <-- HERE  0F1  0B1\n"
        "rank 1    1F1 <-- HERE  1B1           1F0  1B0"
    )


def test_only_the_ranks_of_the_cycle_are_blamed():
    """A rank that merely waits for the cycle is not part of it."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"]
    assert found(rows, [[0, 1, 2]]) == [(1, 1, "1B0", "deadlock"), (2, 0, "2F1", "deadlock")]


def test_a_cycle_goes_through_as_many_ranks_as_it_takes():
    """Three ranks that wait in a ring are all named."""
    rows = ["1F2 1B2 0F0 0B0", "1F0 1B0 0F1 0B1", "1F1 1B1 0F2 0B2"]
    assert found(rows, [[0, 1], [1, 2], [2, 0]], [0, 1, 2]) == [
        (0, 0, "1F2", "deadlock"),
        (2, 0, "1F1", "deadlock"),
        (1, 0, "1F0", "deadlock"),
    ]


def test_a_pair_gives_its_outputs_at_its_end():
    """Two ranks whose pairs each need the other's output wait for ever, though the same actions unpaired do not."""
    pairs = ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"]
    assert found(pairs) == [(0, 1, "0B0", "deadlock"), (1, 1, "1F1", "deadlock")]
    assert found(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]) == []


def test_the_message_lists_ten_and_counts_the_rest():
    """A long list is cut after ten violations and says how many are left."""
    schedule = Schedule.from_text([" ".join(f"0F{i}" for i in range(14))], routes=[[0]])
    with pytest.raises(ScheduleError, match="has 14 violations") as error:
        check(schedule)
    lines = str(error.value).split("\n")
    assert lines[10].startswith("  rank 0, position 14, 0B9: missing")
    assert lines[11] == "  … and 4 more"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["0F0 0B0 0REDUCE_GRAD", "1F0 1B0"], [(1, 2, "1REDUCE_GRAD", "reductions")]),
        (["0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "1F0 1B0 1REDUCE_GRAD"], [(0, 3, "0REDUCE_GRAD", "reductions")]),
        (["0F0 0REDUCE_GRAD 0B0", "1F0 1B0 1REDUCE_GRAD"], [(0, 1, "0REDUCE_GRAD", "reductions")]),
        (["0F0 0I0 0REDUCE_GRAD 0W0", "1F0 1B0 1REDUCE_GRAD"], [(0, 2, "0REDUCE_GRAD", "reductions")]),
        (["0F0 0B0 0REDUCE_GRAD 0STEP 0F1 0B1 0REDUCE_GRAD 0STEP"], []),
        (["0F0 0B0 0STEP 0F1 0B1 0REDUCE_GRAD 0STEP"], [(0, 2, "0REDUCE_GRAD", "reductions")]),
        (["0F0 0B0 0F1 0REDUCE_GRAD 0B1 0STEP"], [(0, 3, "0REDUCE_GRAD", "reductions")]),
        (["0F0 0B0 0REDUCE_GRAD 0STEP 0REDUCE_GRAD"], [(0, 4, "0REDUCE_GRAD", "reductions")]),
    ],
)
def test_reductions_come_once_per_replica_behind_its_last_gradient(rows, expected):
    """Missing, repeated and early reductions are named, in an asynchronous schedule for each update."""
    assert found(rows, [list(range(len(rows)))]) == expected


def test_two_shared_reductions_start_in_one_order():
    """Two ranks that hold the same two stages start their reductions in the same order."""
    rows = ["0F0 1F1 1B1 0B0 0REDUCE_GRAD 1REDUCE_GRAD", "0F1 1F0 1B0 0B1 1REDUCE_GRAD 0REDUCE_GRAD"]
    schedule = Schedule.from_text(rows, routes=CROSSED, microbatch_to_route=[0, 1])
    assert violations(schedule) == [
        Violation(
            1,
            4,
            "1REDUCE_GRAD",
            "rank 0 starts 0REDUCE_GRAD before it and this rank after it; start both in the same order",
            "reductions",
        )
    ]


def test_a_replica_that_reduces_less_often_than_another_is_named():
    """In asynchronous schedules every replica of a stage is reduced before each update, in the order of the others."""
    rows = ["0F0 1F1 1B1 0B0 0REDUCE_GRAD 0STEP 1REDUCE_GRAD 1STEP", "0F1 1F0 1B0 0B1 1REDUCE_GRAD 1STEP 0STEP"]
    assert found(rows, CROSSED, [0, 1]) == [(1, 6, "0REDUCE_GRAD", "reductions")]
    rows[1] = "0F1 1F0 1B0 0B1 1REDUCE_GRAD 1STEP 0REDUCE_GRAD 0STEP"
    assert found(rows, CROSSED, [0, 1]) == [(1, 4, "1REDUCE_GRAD", "reductions")]


@pytest.mark.parametrize(
    ("rows", "versions", "expected"),
    [
        (["0F0 0F1 0B0 0STEP 0B1 0STEP", "1F0 1B0 1STEP 1F1 1B1 1STEP"], None, []),
        (["0F0 0F1 0B0 0STEP 0B1 0STEP", "1F0 1B0 1STEP 1F1 1B1 1STEP"], [0, 0], []),
        (["0F0 0F1 0B0 0STEP 0B1 0STEP", "1F0 1B0 1STEP 1F1 1B1 1STEP"], [0, 1], [(0, 1, "0F1", "updates")]),
        (["0F0 0B0 0F1 0B1"], [0, 1], [(0, 2, "0F1", "updates")]),
        (["0F0 0F1 0B0 0B1 0STEP", "1F0 1B0 1STEP 1F1 1B1"], None, [(1, 4, "1B1", "updates")]),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1 1STEP"], None, [(0, 4, "0STEP", "updates")]),
        (["0F0 0F1 0B0 0STEP 0B1 0STEP", "1F0 1F1 1B0 1B1 1STEP 1STEP"], None, [(0, 4, "0B1", "updates")]),
        (["0F0 0I0 0STEP 0W0 0STEP"], None, [(0, 3, "0W0", "updates")]),
        (["0F0 0F1 0B0 0STEP 0B1"], None, [(0, 4, "0B1", "updates")]),
        (["0F0 0STEP 0B0 0STEP"], None, [(0, 1, "0STEP", "updates")]),
    ],
)
def test_updates_are_the_same_on_every_stage_and_use_every_gradient(rows, versions, expected):
    """Gradients without an update, in different ones, updates without gradients, weights not there yet are named."""
    schedule = Schedule.from_text(rows, routes=[list(range(len(rows)))])
    schedule = replace(schedule, microbatch_to_version=None if versions is None else tuple(versions))
    named = [(v.rank, v.position, v.action, v.rule) for v in violations(schedule)]
    assert named == expected


def test_activations_over_the_limit_are_named_where_they_go_over():
    """The first action over the memory limit is named on each rank, in units of 1/p of the model."""
    rows = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert found(rows, memory_limit=3) == []
    assert found(rows, memory_limit=2) == [(0, 2, "0F2", "memory")]
    assert found(rows, memory_limit=0.5) == [(0, 0, "0F0", "memory"), (1, 0, "1F0", "memory")]


def test_a_schedule_with_a_wrong_number_of_programs_or_routes_cannot_be_made():
    """Programs per rank, routes of micro-batches and the share are checked on construction."""
    placement = Placement(2, ((0, 1),))
    with pytest.raises(ScheduleError, match="1 programs for 2 ranks"):
        Schedule("bad", placement, (0,), ((),))
    with pytest.raises(ScheduleError, match="micro-batch 0 follows route 1"):
        Schedule("bad", placement, (1,), ((), ()))
    with pytest.raises(ScheduleError, match="microbatch_share is 0"):
        Schedule("bad", placement, (0,), ((), ()), 0)
