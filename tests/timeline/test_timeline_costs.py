"""Costs read off timelines: split backwards, reductions that one rank waited for, several steps."""

import pytest

from chimera.errors import UsageError
from chimera.ir.action import parse_instruction
from chimera.ir.timeline import LANES, Timeline
from chimera.timeline.costs import stage_costs


def timeline_of(*rows):
    """Make a timeline of (rank, text, start, end)."""
    spans = [(rank, parse_instruction(text), start, end) for rank, text, start, end in rows]
    return Timeline.from_spans([(r, LANES[a.kind], a, s, e) for r, a, s, e in spans], num_ranks=2)


def test_halves_of_a_backward_make_a_whole_one():
    """I and W have times of their own, and a stage that never ran B takes their sum for it."""
    timeline = timeline_of((0, "0F0", 0, 1), (0, "0I0", 1, 3), (0, "0W0", 4, 7))
    costs = stage_costs([timeline], num_stages=1)
    assert (costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.backward_s) == ([1], [2], [3], [5])


def test_a_reduction_lasts_from_the_last_of_its_ranks_starts():
    """What the first one waited for the other is no cost of the reduction; the median is over steps."""
    step = [(0, "0F0", 0, 1), (0, "0B0", 1, 3), (1, "0F0", 0, 1), (1, "0B0", 1, 9)]
    steps = [
        timeline_of(*step, (0, "0REDUCE_GRAD", 3, 9 + length), (1, "0REDUCE_GRAD", 9, 8.5 + length))
        for length in (1, 5, 2)
    ]
    assert stage_costs(steps, num_stages=1).reduce_s == [2.0]


def test_a_stage_without_a_backward_is_named():
    """Half a profile gives no costs."""
    with pytest.raises(UsageError, match="no time was recorded for 0B; needed: F and B of each stage"):
        stage_costs([timeline_of((0, "0F0", 0, 1))], num_stages=1)
