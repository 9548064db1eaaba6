"""The timeline as a value: clocks, busy time, memory, spans from a recorder."""

import numpy as np
import pytest

from chimera.ir.action import Kind, parse_instruction
from chimera.ir.timeline import LANES, Lane, MemoryCurve, Span, Timeline


def recorded(*spans, **options):
    """Build a timeline of (rank, lane, text, start, end)."""
    rows = [(rank, lane, parse_instruction(text), start, end) for rank, lane, text, start, end in spans]
    return Timeline.from_spans(rows, **options)


def test_spans_come_back_in_order_of_start_with_pairs_whole():
    """A pair is one span; equal starts keep their order; a rank without a span is there."""
    timeline = recorded(
        (1, Lane.COMPUTE, "(0F1;1B0)OVERLAP_F_B", 5.0, 8.0),
        (1, Lane.RECEIVE, "1RECV_F0", 1.0, 2.0),
        (1, Lane.COMPUTE, "1F0", 1.0, 3.0),
        num_ranks=3,
    )
    assert list(timeline.spans(0)) == list(timeline.spans(2)) == []
    assert list(timeline.spans(1)) == [
        Span(1, Lane.RECEIVE, parse_instruction("1RECV_F0"), 1.0, 2.0),
        Span(1, Lane.COMPUTE, parse_instruction("1F0"), 1.0, 3.0),
        Span(1, Lane.COMPUTE, parse_instruction("(0F1;1B0)OVERLAP_F_B"), 5.0, 8.0),
    ]
    assert timeline.busy.tolist() == [0.0, 5.0, 0.0]


def test_both_clocks_count_work_and_not_messages():
    """A receive posted before any work and a send still in flight lengthen neither clock; a reduction does."""
    timeline = recorded(
        (0, Lane.COMPUTE, "0F0", 10.0, 11.0),
        (0, Lane.SEND, "0SEND_F0", 11.0, 40.0),
        (1, Lane.RECEIVE, "1RECV_F0", 0.0, 12.0),
        (1, Lane.COMPUTE, "1F0", 12.0, 15.0),
        (1, Lane.REDUCE, "1REDUCE_GRAD", 15.0, 20.0),
        num_ranks=2,
    )
    assert (timeline.origin, timeline.finish) == (10.0, 20.0)
    assert (timeline.makespan, timeline.span) == (10.0, 8.0)
    assert timeline.bubble_fraction == pytest.approx(1 - 4 / 20)
    assert timeline.bubble_over_ideal == pytest.approx(16 / 4)
    assert timeline.time_by_kind() == {Kind.F: 4.0, Kind.SEND_F: 29.0, Kind.RECV_F: 12.0, Kind.REDUCE_GRAD: 5.0}


def test_a_split_backward_lets_go_at_its_weight_gradient():
    """Memory is held over I until W ends; a backward that ends as a forward starts leaves no dip."""
    timeline = recorded(
        (0, Lane.COMPUTE, "0F0", 0.0, 1.0),
        (0, Lane.COMPUTE, "0I0", 1.0, 2.0),
        (0, Lane.COMPUTE, "0F1", 2.0, 3.0),
        (0, Lane.COMPUTE, "0W0", 3.0, 4.0),
        (0, Lane.COMPUTE, "0F2", 4.0, 5.0),
        (0, Lane.COMPUTE, "0B1", 5.0, 7.0),
        (0, Lane.COMPUTE, "0B2", 8.0, 10.0),
        num_ranks=1,
        activations=[0.5],
    )
    assert timeline.peak_activations == (1.0,)
    times, values, unit = timeline.memory(0)
    assert unit == "activations"
    assert times.tolist() == [0.0, 2.0, 4.0, 7.0, 10.0]
    assert values.tolist() == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert timeline.peak_bytes is None


def test_a_forward_only_program_holds_each_activation_only_while_it_is_made():
    """Evaluation keeps nothing for a backward that never comes."""
    timeline = recorded(
        (0, Lane.COMPUTE, "0F0", 0.0, 1.0), (0, Lane.COMPUTE, "1F0", 2.0, 3.0), num_ranks=1, activations=[1.0, 2.0]
    )
    assert timeline.peak_activations == (2.0,)
    curve = timeline.memory(0)
    assert list(zip(curve.times.tolist(), curve.values.tolist(), strict=True)) == [(0, 1), (1, 0), (2, 2), (3, 0)]


def test_measured_memory_stands_in_place_of_derived_memory():
    """A recorder that knows the allocator's numbers is believed."""
    curve = MemoryCurve(np.array([0.0, 1.0]), np.array([5e6, 7e6]), "bytes")
    timeline = recorded((0, Lane.COMPUTE, "0F0", 0.0, 1.0), num_ranks=1, recorded_memory=[curve])
    assert timeline.memory(0) is curve
    assert timeline.peak_bytes == (7e6,)


def test_a_span_that_ends_before_it_starts_or_lies_on_no_rank_is_our_own_fault():
    """The recorder is trusted no further than its numbers make sense."""
    with pytest.raises(AssertionError, match=r"0F0 on rank 0 ends at 1\.0, before its start 2\.0"):
        recorded((0, Lane.COMPUTE, "0F0", 2.0, 1.0), num_ranks=1)
    with pytest.raises(AssertionError, match="span of rank 1 in a timeline of 1 ranks"):
        recorded((1, Lane.COMPUTE, "0F0", 0.0, 1.0), num_ranks=1)


def test_every_kind_has_a_lane():
    """Computations and steps compute; messages fly; reductions reduce."""
    assert {lane: [kind.name for kind in Kind if LANES[kind] is lane] for lane in Lane} == {
        Lane.COMPUTE: ["F", "B", "I", "W", "STEP"],
        Lane.SEND: ["SEND_F", "SEND_B"],
        Lane.RECEIVE: ["RECV_F", "RECV_B"],
        Lane.REDUCE: ["REDUCE_GRAD"],
    }
