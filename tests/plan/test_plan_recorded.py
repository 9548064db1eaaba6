"""Times of layers from recorded runs in place of modelled ones."""

import json

import pytest

from chimera.errors import FormatError, UsageError
from chimera.ir.costs import StageCosts
from chimera.plan.closed import ModelTimes
from chimera.plan.estimating import estimate
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.layers import LayerTimes
from chimera.plan.layout import Layout
from chimera.plan.planning import plan
from chimera.plan.recorded import RecordedRun, layers_of_stages, layers_of_steps, recorded_step_s
from chimera.plan.search.space import SearchSpace
from chimera.plan.shape import ModelShape

SHAPE = ModelShape(family="gpt", hidden=1024, layers=12, heads=16, vocab=50257, seq=1024)
SOFTWARE = read_software("chimera")
BLOCK, EMBEDDING, HEAD = (
    LayerTimes(*times) for times in ((2.0, 2.5, 1.5, 0.0), (0.5, 0.0, 0.25, 0.0), (3.0, 2.0, 2.0, 0))
)
MODELLED = ModelTimes((LayerTimes(1.0, 1.0, 1.0, 0.0),), LayerTimes(0.1, 0.0, 0.1, 0.0), LayerTimes(1.0, 1.0, 1.0, 0.0))


def cluster_of(count):
    return Cluster.of(read_device("a100-80"), count)


def stage_costs(blocks, *, split=True):
    """Return the costs of stages of these layers."""
    times = [[n * time for time in BLOCK[:3]] for n in blocks]
    for stage, layer in ((0, EMBEDDING), (-1, HEAD)):
        times[stage] = [a + b for a, b in zip(times[stage], layer[:3], strict=True)]
    forward, inputs, weights = zip(*times, strict=True)
    return StageCosts(
        forward_s=list(forward),
        backward_s=[i + w for i, w in zip(inputs, weights, strict=True)],
        weight_grad_s=list(weights) if split else None,
    )


def test_layers_are_told_apart_from_the_stages_between_the_ends():
    """A block is what the middle stages have; embedding and head are the rest of the first and the last."""
    found = layers_of_stages(stage_costs([3, 4, 3, 2]), [3, 4, 3, 2], MODELLED)
    for layer, expected in ((found.blocks[0], BLOCK), (found.embedding, EMBEDDING), (found.head, HEAD)):
        assert layer == pytest.approx(expected)


def test_a_backward_that_was_not_split_divides_as_the_modelled_one():
    """I and W of the modelled block are alike, so half of the recorded backward is each."""
    block = layers_of_stages(stage_costs([3, 3, 3], split=False), [3, 3, 3], MODELLED).blocks[0]
    assert (block.input_grad_s, block.weight_grad_s) == pytest.approx((2.0, 2.0))


def test_two_stages_tell_one_ratio_to_the_model():
    """Without a stage between the ends all layers differ by the same factor, and their sum is the recorded one."""
    costs = stage_costs([6, 6])
    found = layers_of_stages(costs, [6, 6], MODELLED)
    assert found.blocks[0].forward_s / found.head.forward_s == pytest.approx(1.0)
    whole = 12 * found.blocks[0].forward_s + found.embedding.forward_s + found.head.forward_s
    assert whole == pytest.approx(sum(costs.forward_s))


def test_costs_of_another_layout_are_refused():
    """The number of stages has to be the run's."""
    with pytest.raises(UsageError, match="times of 3 stages, the layout has 4"):
        layers_of_stages(stage_costs([4, 4, 4]), [3, 3, 3, 3], MODELLED)


def test_the_time_of_steps_gives_the_estimate_that_takes_as_long():
    """Layers scaled to a run's steps bring its estimate to the recorded time."""
    layout = Layout(pipeline=4, data=2, microbatch=2, microbatches=8)
    modelled = estimate(SHAPE, layout, cluster_of(8), SOFTWARE).step_s
    layers = layers_of_steps(1.7 * modelled, SHAPE, layout, cluster_of(8), SOFTWARE)
    again = estimate(SHAPE, layout, cluster_of(8), SOFTWARE, layer_times=layers).step_s
    assert again == pytest.approx(1.7 * modelled, rel=1e-5)
    with pytest.raises(UsageError, match="reduction and update alone"):
        layers_of_steps(1e-6, SHAPE, layout, cluster_of(8), SOFTWARE)


def test_the_step_of_a_run_is_the_median_of_its_metrics(tmp_path):
    """The first two steps are left out; a line without a time is named."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": n, "step_s": s}) + "\n" for n, s in enumerate((9.0, 5.0, 1.0, 3.0, 2.0)))
    )
    assert recorded_step_s(path) == 2.0
    path.write_text('{"step": 1, "step_s": 1.0}\n{"step": 2}\n')
    with pytest.raises(FormatError, match="line 2"):
        recorded_step_s(path)


def test_a_search_with_recorded_times_keeps_to_what_was_recorded():
    """Layouts have the run's t, b and recomputation; a step twice as slow as modelled is planned twice as slow."""
    layout = Layout(pipeline=4, data=2, microbatch=2, microbatches=8)
    modelled = estimate(SHAPE, layout, cluster_of(8), SOFTWARE)
    layers = layers_of_steps(2 * modelled.step_s, SHAPE, layout, cluster_of(8), SOFTWARE)
    run = RecordedRun(
        name="run", seq=SHAPE.seq, tensor=1, sequence_parallel=False, microbatch=2, mode="none", layers=layers
    )
    space = SearchSpace(schedules=("1f1b", "zb-h1"), sharded=(False,))
    found = plan(SHAPE, cluster_of(8), global_batch=32, measured=run, space=space, top=5, refine=False)
    assert {(each.layout.tensor, each.layout.microbatch, each.layout.recompute) for each in found.plans} == {
        (1, 2, "none")
    }
    alone = plan(
        SHAPE,
        cluster_of(8),
        global_batch=32,
        space=SearchSpace(
            schedules=("1f1b", "zb-h1"), sharded=(False,), tensor=(1,), microbatch=(2,), recompute=("none",)
        ),
        top=1,
        refine=False,
    )
    assert found.best.step_s > 1.5 * alone.best.step_s
    with pytest.raises(
        UsageError, match=r"--costs: run was measured for t = 1, b = 2, recompute none; .* given tensor"
    ):
        plan(SHAPE, cluster_of(8), global_batch=32, measured=run, space=SearchSpace(tensor=(2,)))
