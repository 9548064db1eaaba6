"""The diff of two timelines: times by kind and rank, what only one has, what moved."""

import pytest

from chimera.ir.action import Kind, parse_instruction
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.passes.lower import lower
from chimera.simulate import simulate
from chimera.timeline import diff

ROWS = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def costs(forward, backward):
    return StageCosts(forward_s=[forward] * 2, backward_s=[backward] * 2)


def test_slower_actions_show_by_kind_by_rank_and_in_the_makespan():
    """Backwards that take half as long again: 9 becomes 12, forwards are unchanged."""
    schedule = Schedule.from_text(ROWS, routes=[[0, 1]])
    found = diff(simulate(schedule, costs(1, 2)), simulate(schedule, costs(1, 3)))
    assert found.same_program
    assert found.makespan_ratio == pytest.approx(12 / 9)
    assert [tuple(kind) for kind in found.kinds] == [(Kind.F, 4.0, 4.0, 4, 4), (Kind.B, 8.0, 12.0, 4, 4)]
    assert [tuple(rank) for rank in found.ranks] == [(0, 6.0, 8.0, 3.0, 4.0), (1, 6.0, 8.0, 3.0, 4.0)]
    assert (found.predicted_bubble, found.measured_bubble) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_missing_extra_and_moved_actions_are_named():
    """Rank 0 leaves out 0B1 and runs 0F2; rank 1 swaps its order; each is said once."""
    predicted = simulate(Schedule.from_text(ROWS, routes=[[0, 1]]), costs(1, 2))
    spans = [(0, "0F0"), (0, "0F1"), (0, "0B0"), (0, "0F2"), (1, "1F0"), (1, "1F1"), (1, "1B0"), (1, "1B1")]
    measured = Timeline.from_spans(
        [(rank, Lane.COMPUTE, parse_instruction(text), i, i + 1) for i, (rank, text) in enumerate(spans)], num_ranks=2
    )
    found = diff(predicted, measured)
    assert [(rank, str(action)) for rank, action in found.missing] == [(0, "0B1")]
    assert [(rank, str(action)) for rank, action in found.extra] == [(0, "0F2")]
    assert [(m.rank, m.position, str(m.predicted), str(m.measured)) for m in found.moves] == [(1, 1, "1B0", "1F1")]
    assert not found.same_program


def test_messages_count_only_where_both_have_them():
    """A compute-only prediction of a lowered run is no difference of program; two lowered ones compare messages."""
    schedule = Schedule.from_text(ROWS, routes=[[0, 1]])
    lowered = lower(schedule, reduce=None)
    assert diff(simulate(schedule, costs(1, 2)), simulate(lowered, costs(1, 2))).same_program
    kinds = diff(simulate(lowered, Costs(p2p=1)), simulate(lowered, Costs(p2p=2))).kinds
    assert [(k.kind, k.predicted, k.measured) for k in kinds if k.kind is Kind.SEND_F] == [(Kind.SEND_F, 2.0, 4.0)]


def test_different_units_have_no_ratio():
    """Seconds over model units would be a number without a meaning."""
    schedule = Schedule.from_text(ROWS, routes=[[0, 1]])
    found = diff(simulate(schedule), simulate(schedule, costs(1, 2)))
    assert found.makespan_ratio is None
    assert (found.predicted_unit, found.measured_unit) == ("model unit", "s")
