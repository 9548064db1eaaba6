"""Programs derived from a schedule, and the whole row of lowering."""

import pytest

from chimera.errors import ScheduleError, UsageError
from chimera.ir.checks import check
from chimera.ir.schedule import Schedule
from chimera.passes.derived import compute_only, forward_only, without_reductions
from chimera.passes.lower import lower
from chimera.schedules.registry import build_schedule

STRAIGHT = Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]])


def test_lowering_places_reductions_and_messages():
    """The default is reductions at the end and two receives ahead."""
    assert lower(STRAIGHT).to_text() == [
        "0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
    ]
    assert lower(STRAIGHT, reduce=None).to_text() == ["0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]


def test_lowering_keeps_what_is_there():
    """Own reductions, own messages and steps stay; a lowered schedule comes back as it is."""
    own = Schedule.from_text(["0F0 0B0 0REDUCE_GRAD 0STEP 0F1 0B1 0REDUCE_GRAD 0STEP"], routes=[[0]])
    assert lower(own) == own
    lowered = lower(STRAIGHT)
    assert lower(lowered) is lowered
    messages_only = lower(STRAIGHT, reduce=None)
    assert lower(messages_only, reduce="eager") == lowered


def test_lowering_proves_first():
    """A schedule that is wrong is refused before anything is placed."""
    with pytest.raises(ScheduleError, match="rank 0, position 1, 0B0: missing"):
        lower(Schedule.from_text(["0F0", "1F0 1B0"], routes=[[0, 1]]))
    with pytest.raises(ScheduleError, match="a cycle of 2 ranks"):
        lower(Schedule.from_text(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], routes=[[0, 1]]))


def test_leaving_out_gives_back_what_was_there():
    """compute_only undoes lowering, without_reductions leaves the messages."""
    lowered = lower(STRAIGHT)
    assert compute_only(lowered) == STRAIGHT
    assert without_reductions(lowered) == lower(STRAIGHT, reduce=None)


def test_the_share_of_a_micro_batch_stays():
    """Halved schedules stay halved through every pass."""
    halved = build_schedule("chimera", ranks=4, microbatches=4, unit="halve")
    derived = (lower(halved), compute_only(halved), without_reductions(halved), forward_only(halved, 3))
    assert [schedule.microbatch_share for schedule in derived] == [0.5] * 4


def test_forward_only_takes_any_number_of_micro_batches():
    """Routes take turns, and each rank runs its stages in the order of the slots."""
    chimera = build_schedule("chimera", ranks=4, microbatches=4)
    program = forward_only(chimera, 3)
    assert program.microbatch_to_route == (0, 1, 0)
    assert program.to_text() == ["0F0 0F2 3F1", "1F0 2F1 1F2", "1F1 2F0 2F2", "0F1 3F0 3F2"]
    assert lower(program).to_text()[0] == "3RECV_F1 0F0 0SEND_F0 0F2 0SEND_F2 3F1"


@pytest.mark.parametrize("microbatches", [1, 2, 7, 33])
@pytest.mark.parametrize(
    ("name", "options"),
    [("1f1b", {}), ("interleaved", {"chunks": 3}), ("chimera", {}), ("chimera", {"pairs": 2})],
)
def test_forward_only_programs_are_proved_and_lowered(name, options, microbatches):
    """Every placement evaluates any number of micro-batches."""
    program = forward_only(build_schedule(name, ranks=4, microbatches=8, **options), microbatches)
    check(program, forward_only=True)
    lowered = lower(program)
    check(lowered, forward_only=True)
    assert not any("REDUCE" in row for row in lowered.to_text())
    counts = [program.microbatch_to_route.count(route) for route in range(len(program.placement.routes))]
    assert max(counts) - min(counts) <= 1


def test_forward_only_needs_a_micro_batch():
    """There is no program for none."""
    with pytest.raises(UsageError, match="got 0 micro-batches; needed: at least 1"):
        forward_only(STRAIGHT, 0)
