"""The CSV form of torch.distributed.pipelining."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.errors import FormatError
from chimera.ir.csv_form import from_csv, to_csv
from chimera.ir.schedule import Placement, Schedule

# Written by torch 2.13: its own lowering of 1F1B on two ranks.
TORCH_LOWERED = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
)


def test_compute_only_rows_are_read_with_their_idle_cells_dropped():
    """Empty cells, trailing commas, blanks around cells, CRLF and a missing last newline mean nothing."""
    schedule, notes = from_csv("0F0,0F1,,,0B0,0B1,\r\n,1F0, 1B0 ,1F1,1B1", "hand")
    assert schedule == Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]], name="hand")
    assert notes == ()


def test_stages_live_where_their_rows_are():
    """The placement is inferred from the rows."""
    schedule, _ = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert schedule.placement == Placement(2, ((0, 1, 1, 0),))


def test_communication_that_is_proved_is_kept():
    """The lowered form that torch writes is read whole, less its sharding, which is counted."""
    schedule, notes = from_csv(TORCH_LOWERED)
    assert schedule.to_text() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
    assert notes == (
        "2 UNSHARD left out: parameters here are never sharded between steps",
        "2 RESHARD left out: parameters here are never sharded between steps",
    )


def test_communication_that_fails_the_proof_is_dropped_and_said():
    """Receives in another order than the sends are dropped with the rest of the messages; reductions stay."""
    swapped = TORCH_LOWERED.replace("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0")
    schedule, notes = from_csv(swapped.replace("0UNSHARD,", "").replace("1UNSHARD,", "").replace(",0RESHARD", ""))
    assert schedule.to_text() == ["0F0 0F1 0B0 0B1 0REDUCE_GRAD", "1F0 1B0 1F1 1B1 1REDUCE_GRAD"]
    assert len(notes) == 2
    assert notes[1].startswith(
        "8 sends and receives dropped, to be placed again: they fail the proof (rank 1, position"
    )


def test_reductions_that_fail_the_proof_are_dropped_too():
    """A reduction before the last gradient is no better than a message out of order."""
    schedule, notes = from_csv("0F0,0REDUCE_GRAD,0B0\n1F0,1B0,1REDUCE_GRAD\n")
    assert schedule.to_text() == ["0F0 0B0", "1F0 1B0"]
    assert [note.split(":")[0] for note in notes] == ["2 sends, receives and reductions dropped, to be placed again"]


def test_a_schedule_whose_computations_are_wrong_comes_back_whole():
    """Dropping messages does not help there, so the caller's check gets to say what is wrong."""
    schedule, notes = from_csv("0F0,0SEND_F0\n1RECV_F0,1F0,1B0\n")
    assert (schedule.to_text(), notes) == (["0F0 0SEND_F0", "1RECV_F0 1F0 1B0"], ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1junk\n", "row 0, column 1: '0F1junk' is not an action"),
        ("0F0,0F\n", "row 0, column 1: '0F' is not an action"),
        ("0F0\n1F0,1UNSHARD3\n", "row 1, column 1: '1UNSHARD3' is not an action"),
        ("0F0\n\n1F0\n", "row 1 has no action"),
        ("", "row 0 has no action"),
        ("0F0,1F0\n1B0,0B0\n", "stage 0 stands on rows 0 and 1: this form carries one route"),
        ("0F0\n2F0\n", "there is a stage 2, but stage 1 is on no row"),
        ("0F0,0F999999999\n", "there is a micro-batch 999999999, but micro-batch 1 is on no row"),
        ("999999999F0\n", "there is a stage 999999999, but stage 0 is on no row"),
        ("0STEP\n", "there is no micro-batch"),
    ],
)
def test_rows_that_are_no_schedule_are_refused(text, message):
    """Cells are read strictly, and a number nobody lists never gets memory of its size."""
    with pytest.raises(FormatError) as error:
        from_csv(text)
    assert message in str(error.value)


def test_what_is_written_is_read_back():
    """Rows come back as they were, pairs and communication included."""
    rows = ["0F0 (0F1;0B0)OVERLAP_F_B 0I1 0W1"]
    schedule = Schedule.from_text(rows, routes=[[0]], name="csv")
    assert to_csv(schedule) == "0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1\n"
    assert from_csv(to_csv(schedule)) == (schedule, ())


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Schedule.from_text(["0F0 1F1", "1F0 0F1"], routes=[[0, 1], [1, 0]], microbatch_to_route=[0, 1]),
            "schedule 'text' has 2 routes, the CSV form carries one: write it as JSON instead (--format json)",
        ),
        (Schedule("h", Placement(1, ((0,),)), (0,), ((),)), "rank 0 of 'h' has no action"),
        (Schedule.from_text(["0F0 0STEP"], routes=[[0]]), "rank 0, position 1: 0STEP is no operation of torch"),
        (Schedule("h", Placement(1, ((0,),)), (0,), ((),), 0.5), "cuts micro-batches to a share of 0.5"),
    ],
)
def test_what_the_form_cannot_carry_is_refused_by_name(schedule, message):
    """Several routes, idle ranks, steps and parts of micro-batches need another form."""
    with pytest.raises(FormatError) as error:
        to_csv(schedule)
    assert message in str(error.value)


CELLS = st.sampled_from(
    ["", "0F0", "0B0", "1F0", "1B0", "0F1", "0SEND_F0", "1RECV_F0", "0UNSHARD", "(0F1;0B0)OVERLAP_F_B"]
)


@given(st.lists(st.lists(CELLS | st.text(max_size=3), max_size=6).map(",".join), max_size=3).map("\n".join))
@settings(deadline=None)
def test_any_text_is_read_or_refused_by_name(text):
    """Reading ends in a schedule or in a FormatError, whatever the cells are."""
    try:
        schedule, _ = from_csv(text)
    except FormatError:
        return
    assert from_csv(to_csv(schedule))[0].actions == schedule.actions
