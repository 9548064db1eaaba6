"""The virtual device waits what actions cost, and notices messages that are not the right ones."""

import time

import pytest
import torch

from chimera.errors import RunError
from chimera.ir.costs import Costs
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.virtual import VirtualLayer, VirtualLoss, virtual_batch, virtual_layers
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
    costs = stage_costs(timeline, num_stages=schedule.num_stages) if name != "zb-h1" else None
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
