"""The text grid: slots, signs, cuts, scale for times without a common slot, colours."""

import pytest

from chimera.ir.action import parse_instruction
from chimera.ir.costs import Costs
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.schedules import build_schedule
from chimera.simulate import simulate
from chimera.timeline import draw_grid


def test_chimera_looks_as_in_the_paper():
    """Four ranks, four micro-batches, F = 1, B = 2: the figure of the paper in 16 slots."""
    timeline = simulate(build_schedule("chimera", ranks=4, microbatches=4), Costs(forward=1, backward=2))
    assert draw_grid(timeline).plain().splitlines() == [
        "        0         5         10        15",
        "rank 0  0 1 · 2 2<< 3 3<< · 0<< · · 1<<",
        "rank 1  · 0 2 1 3 · 2<< 0<< 3<< 1<< · ·",
        "rank 2  · 2 0 3 1 · 0<< 2<< 1<< 3<< · ·",
        "rank 3  2 3 · 0 0<< 1 1<< · 2<< · · 3<<",
        "3 forward, 3< backward, · idle; one column of 2 characters is 1 model unit",
    ]


def test_equal_slots_are_wide_enough_for_every_sign():
    """F = B = 1 and two-digit numbers: each backward still shows its sign, so colour is never needed."""
    rows = ["0F0 0F10 0I0 0W0 0B10"]
    timeline = simulate(
        Schedule.from_text(rows, routes=[[0]]), Costs(forward=1, backward=1, input_grad=1, weight_grad=1)
    )
    assert draw_grid(timeline).plain().splitlines()[1] == "rank 0  0   10  0i  0w  10<"


def test_a_grid_wider_than_the_terminal_is_cut_and_says_what_is_missing():
    """No line is wider than asked, and the note counts what is not seen."""
    timeline = simulate(build_schedule("1f1b", ranks=4, microbatches=8), Costs(forward=1, backward=2))
    lines = draw_grid(timeline, columns=40).plain().splitlines()
    assert max(map(len, lines[:5])) <= 40
    beyond = int((timeline.end > 16).sum())
    assert lines[-1] == f"cut at slot 16 of 33: {beyond} actions end beyond it; the whole grid needs 74 columns"
    assert "cut" not in draw_grid(timeline, columns=74).plain()


def test_recorded_times_are_drawn_to_scale():
    """Without a common slot a column is a share of the makespan, and nothing is cut."""
    spans = [(0, "0F0", 5.0, 5.5177), (0, "0B0", 6.9331, 7.99), (1, "1F0", 5.61, 6.0), (1, "1B0", 6.01, 6.9)]
    timeline = Timeline.from_spans(
        [(rank, Lane.COMPUTE, parse_instruction(text), start, end) for rank, text, start, end in spans], num_ranks=2
    )
    lines = draw_grid(timeline, columns=38).plain().splitlines()
    assert lines[1] == "rank 0  0    " + "·" * 14 + "0<<<<<<<<<"
    assert lines[2] == "rank 1  ······0   " + "0<<<<<<< " + "·" * 11
    assert lines[-1] == "3 forward, 3< backward, · idle; one column of 1 character is 0.09967 s"


def test_actions_shorter_than_a_column_are_counted():
    """A forward of a thousandth of the makespan is not drawn, but it is not forgotten either."""
    spans = [(0, "0F0", 0.0, 0.0101), (0, "0B0", 1.0, 9.9)]
    timeline = Timeline.from_spans(
        [(rank, Lane.COMPUTE, parse_instruction(text), start, end) for rank, text, start, end in spans], num_ranks=1
    )
    assert (
        draw_grid(timeline, columns=30).plain().splitlines()[-1] == "1 actions are shorter than a column and not shown"
    )


@pytest.mark.parametrize("name", ["chimera", "1f1b"])
def test_colours_change_no_character(name):
    """The rich form has the same text; forwards of opposite routes have different colours, backwards are darker."""
    grid = draw_grid(simulate(build_schedule(name, ranks=4, microbatches=4)))
    assert [line.rstrip() for line in grid.rich().plain.splitlines()] == grid.plain().splitlines()
    fills = {cell.text.strip(): cell.paint.fill for cell in grid.rows[0] if cell.paint}
    assert fills["0"] != fills["0<<"]
    assert (fills["0"] != fills["3"]) == (name == "chimera")


def test_an_empty_timeline_draws_empty_rows():
    """Two ranks that do nothing are two labels."""
    timeline = simulate(Schedule.from_text(["", ""], routes=[[0, 1]]))
    assert draw_grid(timeline, columns=12).plain().splitlines()[1:3] == ["rank 0  ····", "rank 1  ····"]
