"""The text form of a whole schedule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.errors import FormatError
from chimera.ir.schedule import Placement, Schedule
from chimera.ir.text_form import from_text, to_text

TWO_ROUTES = Schedule.from_text(
    ["0F0 1F1 1B1 0B0 0REDUCE_GRAD", "0F1 1F0 1B0 0B1"],
    routes=[[0, 1], [1, 0]],
    microbatch_to_route=[0, 1],
    name='my "chimera"',
)


def test_the_head_states_what_the_rows_do_not():
    """Name, routes and micro-batches stand before the rows."""
    assert to_text(TWO_ROUTES) == (
        'name: "my \\"chimera\\""\n'
        "routes: 0 1 | 1 0\n"
        "microbatches: 0 1\n"
        "0F0 1F1 1B1 0B0 0REDUCE_GRAD\n"
        "0F1 1F0 1B0 0B1\n"
    )


def test_what_is_written_is_read_back():
    """Several routes, parts of micro-batches and idle ranks survive."""
    assert from_text(to_text(TWO_ROUTES)) == TWO_ROUTES
    half = Schedule("half", Placement(2, ((1,),)), (0,), ((), TWO_ROUTES.actions[0][:1]), 0.5)
    assert "share: 0.5\n-\n0F0\n" in to_text(half)
    assert from_text(to_text(half)) == half


def test_rows_alone_are_enough_for_one_route():
    """Comments and blank lines mean nothing, and the placement is inferred."""
    schedule = from_text("# by hand\n0F0 0B0\n\n1F0 1B0\n", "hand")
    assert schedule == Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]], name="hand")
    assert from_text("routes: 0 0\n0F0 1F0 1B0 0B0\n") == Schedule.from_text(["0F0 1F0 1B0 0B0"], routes=[[0, 0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no stage"),
        ("0F0 0Fx", "row 0, column 1: '0Fx' is not an action"),
        ("nmae: x\n0F0", "line 1: unknown key 'nmae' (did you mean 'name'?)"),
        ("routes: 0\nroutes: 0\n0F0", "line 2: routes: is given twice"),
        ("0F0\nroutes: 0", "line 2: routes: stands behind the first row"),
        ("name: plain\n0F0", "name: 'plain' is no name; needed: 1 to 200 printable characters in double quotes"),
        ('name: "\\u001b[31m"\n0F0', "is no name"),
        ("share: 0.5\n0F0", "share: is given without routes:"),
        ("routes: 0\nshare: 2\n0F0", "share: '2' is no part of a micro-batch"),
        ("routes: 0\nshare: nan\n0F0", "share: 'nan' is no part of a micro-batch"),
        ("routes: 0 | x\n0F0", "routes: 'x' is no list of numbers"),
        ("routes: 0 1\n0F0", "routes: name rank 1, but there are 1 rows; write - for an idle rank"),
        ("routes: 0 | 0 0\nmicrobatches: 0\n0F0", "routes: have 1, 2 stages; all must place the same number"),
        ("routes: 0 | 0\n0F0", "microbatches: is missing; needed with several routes"),
        ("routes: 0\nmicrobatches: 1\n0F0", "microbatches: put micro-batch 0 on route 1 of 1"),
        ("routes: 0\n0F999999999", "there is a micro-batch 999999999, but micro-batch 0 is on no row"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, message):
    """Each damage is named with its line, or its row and column."""
    with pytest.raises(FormatError) as error:
        from_text(text)
    assert message in str(error.value)


LINES = st.sampled_from(
    ["routes: 0 1", "routes: 0 | 0", "microbatches: 0", "share: 0.5", "-", "0F0 1B0", "1F0", 'name: "n"']
)


@given(st.lists(LINES | st.text(max_size=5), max_size=6).map("\n".join))
@settings(deadline=None)
def test_any_text_is_read_or_refused_by_name(text):
    """Reading ends in a schedule that round-trips or in a FormatError."""
    try:
        schedule = from_text(text)
    except FormatError:
        return
    assert from_text(to_text(schedule)) == schedule


def test_versions_of_the_weights_are_read_back():
    """What an asynchronous schedule says of its micro-batches' weights stands in the head; a wrong number is named."""
    text = 'name: "own"\nroutes: 0\nmicrobatches: 0 0\nversions: 0 1\n0F0 0B0 0STEP 0F1 0B1 0STEP\n'
    schedule = from_text(text)
    assert schedule.microbatch_to_version == (0, 1)
    assert to_text(schedule) == text
    with pytest.raises(FormatError, match="versions: has 1 numbers for 2 micro-batches; give as many"):
        from_text(text.replace("versions: 0 1", "versions: 0"))
    with pytest.raises(FormatError, match="versions: is given without routes:"):
        from_text("versions: 0\n0F0 0B0 0STEP")
