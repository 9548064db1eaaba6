"""Sends and receives: where they stand, how far ahead, and what happens at too small a depth."""

import pytest

from chimera.errors import ScheduleError, UsageError
from chimera.ir.checks import check
from chimera.ir.schedule import Schedule
from chimera.passes.communication import add_communication
from chimera.passes.lower import lower
from chimera.passes.waits import waits
from chimera.schedules.registry import build_schedule

ONE_F_ONE_B = Schedule.from_text(
    ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"], routes=[[0, 1]]
)


def test_receives_are_posted_two_ahead():
    """Message n of a channel is posted behind the consumer of message n − 2, the first two at the start."""
    assert add_communication(ONE_F_ONE_B).to_text() == [
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B2 0F2 0SEND_F2 0B1 0RECV_B3 0F3 0SEND_F3 0B2 0B3",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1B0 1SEND_B0 1F1 1RECV_F3 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1F3 1B3 1SEND_B3",
    ]


def test_without_a_bound_all_receives_stand_at_the_start():
    """A depth of None posts everything first."""
    assert add_communication(ONE_F_ONE_B, receive_depth=None).to_text() == [
        "0RECV_B0 0RECV_B1 0RECV_B2 0RECV_B3 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0F2 0SEND_F2 0B1 0F3 0SEND_F3 0B2 0B3",
        "1RECV_F0 1RECV_F1 1RECV_F2 1RECV_F3 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1F3 1B3 1SEND_B3",
    ]


def test_a_depth_that_gets_stuck_is_deepened():
    """Four forwards ahead of a rank that alternates need two receives posted; asked for one, the pass takes two."""
    rows = ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    schedule = Schedule.from_text(rows, routes=[[0, 1]])
    assert add_communication(schedule, receive_depth=1) == add_communication(schedule, receive_depth=2)


def test_receives_follow_the_sends_where_the_consumers_do_not():
    """A consumer out of the channel's order gets the receives of all messages sent before its own posted first."""
    schedule = Schedule.from_text(["0F0 0F1 0F2 0B0 0B1 0B2", "1F2 1F0 1F1 1B0 1B1 1B2"], routes=[[0, 1]])
    assert add_communication(schedule, receive_depth=1).to_text() == [
        "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1RECV_F1 1RECV_F2 1F2 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2",
    ]


def test_stages_on_one_rank_hand_over_directly():
    """In a V placement the turn sends nothing."""
    schedule = Schedule.from_text(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"], routes=[[0, 1, 1, 0]])
    assert add_communication(schedule).to_text() == [
        "3RECV_F0 0RECV_B0 0F0 0SEND_F0 3F0 3B0 3SEND_B0 0B0",
        "1RECV_F0 2RECV_B0 1F0 2F0 2SEND_F0 2B0 1B0 1SEND_B0",
    ]


def test_a_pair_sends_both_its_outputs_behind_it():
    """Receives of both halves stand before the pair, both sends behind it."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1"]
    assert add_communication(Schedule.from_text(rows, routes=[[0, 1, 2]])).to_text()[1] == (
        "1RECV_F0 1RECV_F1 1RECV_B0 1RECV_B1 1F0 1SEND_F0 (1F1;1B0)OVERLAP_F_B 1SEND_F1 1SEND_B0 1B1 1SEND_B1"
    )


def test_the_wait_list_of_a_pair_names_both_receives():
    """A pair waits for the data of its forward and of its backward."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1"]
    listed = waits(add_communication(Schedule.from_text(rows, routes=[[0, 1, 2]])))
    assert listed[1] == ((), (), (), (), (0,), (), (1, 2), (), (), (3,), ())


def test_waits_of_a_schedule_with_a_missing_message_are_refused():
    """There is no list for messages that are not there."""
    assert waits(Schedule.from_text(["0F0 0B0"], routes=[[0]])) == (((), ()),)
    with pytest.raises(ScheduleError, match="rank 1, position 0, 1RECV_F0: missing"):
        waits(Schedule.from_text(["0F0 0SEND_F0", "1F0"], routes=[[0, 1]]))


def test_wrong_requests_are_refused():
    """A lowered schedule, a wrong one and a depth below one."""
    with pytest.raises(ScheduleError, match="has sends and receives already"):
        add_communication(add_communication(ONE_F_ONE_B))
    with pytest.raises(ScheduleError, match="rank 0, position 1, 0B0: missing"):
        add_communication(Schedule.from_text(["0F0", "1F0 1B0"], routes=[[0, 1]]))
    with pytest.raises(UsageError, match="receive_depth is 0; needed: at least 1, or None"):
        add_communication(ONE_F_ONE_B, receive_depth=0)


def test_sixty_five_thousand_computations_are_lowered_whole():
    """Every message and reduction of 64 ranks × 256 micro-batches × 2 chunks is there."""
    schedule = build_schedule("interleaved", ranks=64, microbatches=256, chunks=2)
    check(schedule)
    lowered = lower(schedule)
    assert len(lowered.table) == 64 * 256 * 2 * 2 + 127 * 256 * 4 + 128
