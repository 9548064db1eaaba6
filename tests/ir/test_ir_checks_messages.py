"""The proof of lowered schedules: sends, receives, their order on each channel, and the blocking semantics."""

import pytest

from chimera.ir.checks import Violation, violations
from chimera.ir.schedule import Schedule


def found(rows, **options):
    """Return the violations of a two-stage schedule in text form as (rank, position, action, rule)."""
    schedule = Schedule.from_text(rows, routes=[[0, 1]])
    return [(v.rank, v.position, v.action, v.rule) for v in violations(schedule, **options)]


def test_a_sound_lowered_schedule_is_proved():
    """Each message is sent behind its producer and received before its consumer."""
    assert found(["0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]) == []
    assert found(["0F0 0SEND_F0", "1RECV_F0 1F0"], forward_only=True) == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], [(0, 1, "0SEND_F0", "messages")]),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"], [(1, 0, "1RECV_F0", "messages")]),
        (["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"], [(1, 3, "1SEND_B0", "messages"), (0, 2, "0RECV_B0", "messages")]),
        (["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], [(0, 0, "0SEND_F0", "messages")]),
        (["0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"], [(0, 3, "0RECV_B0", "messages")]),
        (
            ["0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
            [(0, 2, "0SEND_F0", "messages")],
        ),
        (
            ["0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0"],
            [(1, 2, "1SEND_F0", "messages"), (0, 4, "0SEND_B0", "messages")],
        ),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "0RECV_B0 1RECV_F0 1F0 1B0 1SEND_B0"], [(1, 0, "0RECV_B0", "placement")]),
    ],
)
def test_missing_early_late_repeated_and_needless_messages_are_named(rows, expected):
    """What is wrong with a message is named at its own place, or where it is missing."""
    assert found(rows) == expected


def test_neighbours_on_one_rank_send_nothing():
    """A message between two stages of one rank is refused, for they hand over directly."""
    row = "0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"
    schedule = Schedule.from_text([row], routes=[[0, 0]])
    assert violations(schedule) == [
        Violation(0, 1, "0SEND_F0", "stage 1 is on the same rank and hands over directly; remove it", "messages"),
        Violation(0, 2, "1RECV_F0", "stage 0 is on the same rank and hands over directly; remove it", "messages"),
    ]


def test_swapped_messages_are_found_though_nothing_gets_stuck():
    """Receives in another order than the sends of their channel would swap the data."""
    rows = [
        "0RECV_B0 0RECV_B1 0F0 0F1 0SEND_F1 0SEND_F0 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert violations(Schedule.from_text(rows, routes=[[0, 1]])) == [
        Violation(
            1,
            0,
            "1RECV_F0",
            "message 0 to be received on the channel from rank 0 to rank 1 on route 0, but message 0 sent there is "
            "0SEND_F1 at position 4: they would be swapped. Put the receives in the order of the sends",
            "fifo",
        )
    ]


def test_activations_and_gradients_share_a_channel():
    """A gradient and an activation in one direction and route come in one order too; another route has its own."""
    # Stages 0 and 2 on rank 0, 1 and 3 on rank 1: rank 0 sends activations into 1 and 3, and gradients into 1.
    straight = [
        "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0",
    ]
    assert violations(Schedule.from_text(straight, routes=[[0, 1, 0, 1]])) == []
    crossed = [
        straight[0],
        straight[1].replace("3RECV_F0 3F0", "1RECV_B0 3RECV_F0 3F0").replace(" 1RECV_B0 1B0", " 1B0"),
    ]
    assert [(v.action, v.rule) for v in violations(Schedule.from_text(crossed, routes=[[0, 1, 0, 1]]))] == [
        ("1RECV_B0", "fifo")
    ]


def test_two_routes_have_two_channels():
    """Messages of different routes between the same ranks may be received in any order."""
    rows = [
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1 1SEND_B1 1SEND_B0",
    ]
    one = Schedule.from_text(rows, routes=[[0, 1]])
    two = Schedule.from_text(rows, routes=[[0, 1], [0, 1]], microbatch_to_route=[0, 1])
    assert [v.rule for v in violations(one)] == ["fifo", "fifo"]
    assert violations(two) == []


def test_a_send_returns_only_when_its_receive_is_posted():
    """Two ranks that send before they post what the other sends are stuck, and each is told about the other."""
    rows = [
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]
    assert violations(Schedule.from_text(rows, routes=[[0, 1]])) == [
        Violation(
            0,
            3,
            "0SEND_F1",
            "waits for 1RECV_F1 of rank 1 at position 4, but rank 1 is itself waiting at position 3 (1SEND_B0): "
            "a cycle of 2 ranks; reorder one of them",
            "deadlock",
        ),
        Violation(
            1,
            3,
            "1SEND_B0",
            "waits for 0RECV_B0 of rank 0 at position 4, but rank 0 is itself waiting at position 3 (0SEND_F1): "
            "a cycle of 2 ranks; reorder one of them",
            "deadlock",
        ),
    ]
    assert (
        found([rows[0], rows[1].replace("1RECV_F0 1F0", "1RECV_F0 1RECV_F1 1F0").replace("0 1RECV_F1 1F1", "0 1F1")])
        == []
    )


def test_what_a_pair_receives_stands_before_it_and_what_it_sends_behind():
    """Messages of a pair's halves are placed around the pair as a whole."""
    sound = ["0F0 0SEND_F0 0RECV_B0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0RECV_B1 0B1", "{} 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"]
    sound[1] = sound[1].format("1RECV_F0 1RECV_F1")
    assert found(sound) == []
    late = [sound[0].replace("0RECV_B0 (0F1;0B0)OVERLAP_F_B", "(0F1;0B0)OVERLAP_F_B 0RECV_B0"), sound[1]]
    assert found(late) == [(0, 3, "0RECV_B0", "messages")]
    early = [sound[0].replace("(0F1;0B0)OVERLAP_F_B 0SEND_F1", "0SEND_F1 (0F1;0B0)OVERLAP_F_B"), sound[1]]
    assert found(early) == [(0, 3, "0SEND_F1", "messages")]
