"""The virtual device waits what actions cost, and notices messages that are not the right ones."""

import statistics
import time

import pytest
import torch

from chimera.errors import RunError
from chimera.ir.action import Kind, parse_instruction
from chimera.ir.costs import Costs, PairTime, StageCosts
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.runtime.overlap import LayerBackward, LayerForward
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.virtual import PairedVirtualLayer, VirtualLayer, VirtualLoss, virtual_batch, virtual_layers
from chimera.schedules import build_schedule
from chimera.timeline.costs import stage_costs


def timeline_of(group, name, microbatches, forward_s, backward_s):
    """Run one step on a rank of the pool; return each action's name and seconds, on this rank."""
    schedule = build_schedule(name, ranks=group.size(), microbatches=microbatches)
    layers = virtual_layers(Costs(forward=forward_s, backward=backward_s).resolve(schedule), schedule.num_microbatches)
    pipe = Pipeline(layers, schedule, VirtualLoss(len(layers)), group)
    pipe.step(*virtual_batch(schedule.num_microbatches, 4096))
    timeline = pipe.timeline()
    pipe.close()
    costs = stage_costs([timeline], num_stages=schedule.num_stages) if name != "zb-h1" else None
    spans = [(str(span.action), span.end - span.start) for span in timeline.spans(group.rank()) if span.lane == 0]
    return spans, None if costs is None else (list(costs.forward_s), list(costs.backward_s))


def test_actions_take_what_they_cost(ranks):
    """No action is shorter than its cost, and the costs read off the timeline are those that were put in."""
    for spans, (forward, backward) in ranks.run(2, timeline_of, "1f1b", 3, 0.01, 0.02):
        assert len(spans) == 6
        for action, seconds in spans:
            assert seconds >= (0.01 if "F" in action else 0.02)
        # Medians of three: how much longer a wait may last on a busy machine is not the project's to say.
        assert min(forward) >= 0.01
        assert min(backward) >= 0.02


def test_a_split_backward_waits_in_both_parts(ranks):
    """I and W take their own shares of the backward."""
    for spans, _ in ranks.run(2, timeline_of, "zb-h1", 4, 0.004, 0.012):
        kinds = {kind: [s for action, s in spans if kind in action] for kind in "FIW"}
        assert all(seconds >= 0.004 for seconds in kinds["F"])
        assert kinds["I"]
        assert all(seconds >= 0.006 for seconds in kinds["I"] + kinds["W"])


PAIRS = Schedule.from_text(
    ["0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0I0)OVERLAP_F_B (0F2;1B1)OVERLAP_F_B 0W0 0B1 1F2 1B2 0B2"], routes=[[0, 0]]
)


def test_a_pair_takes_its_own_time():
    """A pair with a time takes it, one without the sum of its two; the costs read off it have the pairs beside."""
    given = StageCosts(
        forward_s=[0.002] * 2,
        backward_s=[0.004] * 2,
        overlap_s=[PairTime(0, 1, Kind.B, 0.02)],
        weight_grad_s=[0.003] * 2,
    )
    layers = virtual_layers(given.resolve(PAIRS), 3)
    pipe = Pipeline(layers, PAIRS, VirtualLoss(2))
    pipe.step(*virtual_batch(3, 64))
    seconds = {str(span.action): span.end - span.start for span in pipe.timeline().spans(0)}
    together = [seconds[f"(0F{m};1B{m - 1})OVERLAP_F_B"] for m in (1, 2)]
    assert min(together) >= 0.02
    # A forward of 2 ms and an I of 1 ms; the machine may add to it, but not the 17 ms that are between.
    assert 0.003 <= seconds["(1F1;0I0)OVERLAP_F_B"] < min(together)
    assert seconds["0W0"] >= 0.003
    found = stage_costs([pipe.timeline()], num_stages=2)
    assert [tuple(pair) for pair in found.overlap_s] == [
        (0, 1, Kind.B, statistics.median(together)),
        (1, 0, Kind.I, seconds["(1F1;0I0)OVERLAP_F_B"]),
    ]
    assert found.forward_s[0] == seconds["0F0"]
    assert found.backward_s[1] == seconds["1B2"]


def test_a_stage_that_ran_in_pairs_alone_is_given_half_of_them():
    """Where no forward of a stage stands on its own, half its pairs' time is all that is known."""
    spans = [("0F0", 1), ("(1F0;0B1)OVERLAP_F_B", 6), ("0F1", 3), ("1B0", 4), ("0B0", 9)]
    timeline = Timeline.from_spans(
        [(0, Lane.COMPUTE, parse_instruction(text), 10 * n, 10 * n + s) for n, (text, s) in enumerate(spans)],
        num_ranks=1,
    )
    found = stage_costs([timeline], num_stages=2)
    assert (found.forward_s, found.backward_s) == ([2.0, 3.0], [9.0, 4.0])


def test_a_pair_notices_the_gradient_of_another_micro_batch():
    """What a backward checks, it checks in a pair."""
    layer = PairedVirtualLayer(0, pair_s={}, forward_s=0, backward_s=0, total=1.0)
    (first, _), _ = virtual_batch(2, 64)
    due = LayerBackward(layer, (layer(first),), (torch.full_like(first, 2.0),))
    with pytest.raises(RunError, match="got the gradient of micro-batch 2 where that of 1 was due"):
        layer.overlapped_forward_backward(LayerForward(layer, (first,), {}), due)


def test_the_loss_notices_another_micro_batch():
    """An output that belongs to another micro-batch than its target is an error, not a number."""
    (first, second), (target, _) = virtual_batch(2, 64)
    loss = VirtualLoss(num_layers=1)
    layer = VirtualLayer(0, forward_s=0, backward_s=0, total=1.0)
    assert loss(layer(first), target)["virtual"][1] == 1.0
    with pytest.raises(RunError, match="the loss got micro-batch 2 where 1 was due"):
        loss(layer(second), target)


def test_a_layer_notices_the_gradient_of_another_micro_batch():
    """A gradient that belongs to another micro-batch than the saved input is an error."""
    (first, _), _ = virtual_batch(2, 64)
    layer = VirtualLayer(0, forward_s=0, backward_s=0, total=1.0)
    layer(first).backward(torch.full_like(first, 1.0))
    with pytest.raises(RunError, match="got the gradient of micro-batch 2 where that of 1 was due"):
        layer(first).backward(torch.full_like(first, 2.0))


def test_a_wait_is_not_shorter_than_asked_for_where_less_is_slept():
    """What is slept less, for the sleep's own surplus, is waited out."""
    layer = VirtualLayer(0, forward_s=0.002, backward_s=0, total=1.0, oversleep_s=0.0015)
    start = time.perf_counter()
    layer(torch.zeros(1, 1))
    assert time.perf_counter() - start >= 0.002
