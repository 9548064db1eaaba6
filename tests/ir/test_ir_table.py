"""Programs in columns and back."""

from chimera.ir.schedule import Schedule


def test_programs_come_back_from_their_columns():
    """Pairs, whole-stage actions and idle ranks survive the way through the table."""
    rows = ["0F0 (0F1;0B0)OVERLAP_F_B 0B1 0REDUCE_GRAD", "", "1F0 1F1 1I1 1W1 1B0 1STEP"]
    schedule = Schedule.from_text(rows, routes=[[0, 2]])
    assert schedule.table.to_programs() == schedule.actions
    again = schedule.with_table(schedule.table)
    assert again == schedule
    assert again.to_text() == rows
    assert again.table is schedule.table


def test_the_table_counts_instructions_and_flattens_pairs():
    """A pair takes two rows at one position."""
    table = Schedule.from_text(["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "0F2"], routes=[[0], [1]]).table
    assert table.position.tolist() == [0, 1, 1, 2, 0]
    assert table.paired.tolist() == [False, True, True, False, False]
    assert table.rank.tolist() == [0, 0, 0, 0, 1]
    assert table.offsets.tolist() == [0, 4, 5]


def test_only_messages_make_a_schedule_lowered():
    """Reductions alone do not."""
    assert not Schedule.from_text(["0F0 0B0 0REDUCE_GRAD"], routes=[[0]]).is_lowered
    assert Schedule.from_text(["0F0 0SEND_F0", "1RECV_F0 1F0"], routes=[[0, 1]]).is_lowered
