"""The estimate of one layout, prices of many at once, folded steps and the closed form of 1F1B, held together."""

import numpy as np
import pytest

from chimera.errors import ConfigError, FormatError, InfeasibleError, UsageError
from chimera.ir.costs import Costs, StageCosts
from chimera.plan.activations import RECOMPUTE_CODES
from chimera.plan.estimating import estimate
from chimera.plan.folding import folded_step, simulated_step
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import known_devices, known_software, read_device, read_software, write_device
from chimera.plan.layers import LayerTimes
from chimera.plan.layout import Layout
from chimera.plan.search.model_pricing import ModelPricing
from chimera.plan.search.pricing import Choices
from chimera.plan.search.skeleton import skeleton
from chimera.plan.search.variants import Variant
from chimera.plan.shape import ModelShape
from chimera.plan.step import pipeline_s
from chimera.schedules import SCHEDULES, build_schedule
from chimera.simulate import simulate

GPT3 = ModelShape(family="gpt", hidden=12288, layers=96, heads=96, vocab=51200, seq=2048)
A100 = read_device("a100-80")
MEGATRON = read_software("megatron-2022")


@pytest.mark.parametrize("name", known_devices())
def test_device_files_hold_whole_devices(name, tmp_path):
    """Each device has its constants and sources, and reads back as written."""
    device = read_device(name)
    write_device(device, tmp_path / "copy.json")
    assert read_device(tmp_path / "copy.json") == device
    assert len(device.constants) == 10
    assert all(one.low <= one.value <= one.high for one in device.constants.values())


@pytest.mark.parametrize("name", known_software())
def test_a_code_base_has_at_most_two_constants(name):
    """What is fitted to one code base stays two numbers."""
    assert len(read_software(name).constants) <= 2


def test_unknown_and_broken_devices_are_refused(tmp_path):
    """An unknown name brings the nearest; a file with a missing key names it."""
    with pytest.raises(UsageError, match="a100-80"):
        read_device("a100-8")
    broken = tmp_path / "mine.json"
    broken.write_text('{"format": "chimera-device", "version": 1, "name": "mine"}', encoding="utf-8")
    with pytest.raises(FormatError, match="missing"):
        read_device(broken)


def test_a_cluster_is_whole_nodes():
    """A part of a node is refused beside whole ones, with the nearest counts."""
    with pytest.raises(ConfigError, match="--gpus 8 or 16"):
        Cluster.of(A100, 12)


def test_a_node_has_an_adapter():
    """Fewer than one is refused; without a number it has its usual machine's, at most one a device."""
    with pytest.raises(ConfigError, match="--adapters 0"):
        Cluster.of(A100, 16, adapters=0)
    assert [Cluster.of(A100, 16, adapters=given).adapters for given in (None, 4)] == [8, 4]
    assert Cluster.of(A100, 4).adapters == 4


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_folded_step_is_the_whole_step(name):
    """Makespan and peaks of a long step, its steady state repeated, are within 0.1 % of the full simulation."""
    if SCHEDULES[name].searched:
        pytest.skip("searched anew for each m")
    costs = Costs(forward=1.0, backward=2.1, weight_grad=0.9, p2p=0.05)

    def build(microbatches):
        return build_schedule(name, ranks=4, microbatches=microbatches)

    folded = folded_step(build, 66, costs, ranks=4)
    whole = simulated_step(build(66), costs)
    assert folded.makespan == pytest.approx(whole.makespan, rel=1e-3)
    np.testing.assert_allclose(folded.peak_activations, whole.peak_activations, rtol=1e-3)
    np.testing.assert_allclose(folded.busy, whole.busy, rtol=1e-3)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v", "interleaved-zb", "1f1b"])
def test_a_heavy_rank_that_is_hidden_for_long_is_folded_rightly(name):
    """A schedule that runs ahead hides a heavy last stage for long, which is not yet the steady state."""

    def build(microbatches):
        return build_schedule(name, ranks=4, microbatches=microbatches)

    weight = np.ones(build(8).num_stages)
    weight[-1] += 0.025 * len(weight) / 4
    costs = StageCosts(
        forward_s=(1.84 * weight).tolist(), backward_s=(4.27 * weight).tolist(), weight_grad_s=(1.74 * weight).tolist()
    )
    for microbatches in (44, 96):
        folded = folded_step(build, microbatches, costs, ranks=4)
        whole = simulated_step(build(microbatches), costs)
        assert folded.makespan == pytest.approx(whole.makespan, rel=1e-3)
        np.testing.assert_allclose(folded.busy, whole.busy, rtol=1e-3)


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_groups_that_even_out_are_folded_rightly(name):
    """Where p does not divide m, groups of unequal length even out as m grows: peaks grow at first and then no more."""
    ranks, microbatches = 16, 345
    weight = np.ones(2 * ranks)
    weight[-1] = 3.0
    costs = StageCosts(
        forward_s=weight.tolist(),
        backward_s=(2 * weight).tolist(),
        weight_grad_s=weight.tolist(),
        activation_bytes=[1.0] * (2 * ranks),
    )

    def build(count):
        return build_schedule(name, ranks=ranks, microbatches=count, chunks=2)

    folded = folded_step(build, microbatches, costs, ranks=ranks)
    whole = simulated_step(build(microbatches), costs)
    assert folded.makespan == pytest.approx(whole.makespan, rel=1e-3)
    np.testing.assert_allclose(folded.peak_bytes, whole.peak_bytes)
    np.testing.assert_allclose(folded.peak_activations, whole.peak_activations)
    assert (skeleton(Variant(schedule=name, chunks=2), ranks, microbatches).peak_stages <= whole.peak_bytes).all()


def test_an_asynchronous_step_updates_as_often_as_it_does():
    """PipeDream updates after every micro-batch, so that its updates take m times those of one step."""
    times = {}
    for schedule in ("1f1b", "pipedream"):
        layout = Layout(pipeline=4, microbatches=8, schedule=schedule)
        times[schedule] = estimate(GPT3, layout, Cluster.of(A100, 4), MEGATRON).optimizer_s
    assert times["pipedream"] == pytest.approx(8 * times["1f1b"])


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("hop", [0.0, 0.05])
def test_the_closed_form_of_1f1b_is_its_simulation(chunks, hop):
    """What the fit takes for a pipeline is what the simulator makes of it, within a hundredth of the step."""
    ranks, microbatches = 4, 12
    layer = LayerTimes(0.25, 0.3, 0.2, 0.0)
    stages = ranks * chunks
    blocks = LayerTimes(*(8 * time for time in layer))
    none = LayerTimes(0.0, 0.0, 0.0, 0.0)
    predicted = pipeline_s(4.0, 12.0, float(chunks), blocks=blocks, embedding=none, head=none, hop_s=hop)
    exposed = hop * (chunks - 1) / chunks
    costs = StageCosts(
        forward_s=[blocks.forward_s / chunks + exposed] * stages,
        backward_s=[blocks.backward_s / chunks + exposed] * stages,
        latency_s=hop,
    )
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks if chunks > 1 else None)
    assert float(predicted) == pytest.approx(simulate(schedule, costs).makespan, rel=0.01)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 8, "pipeline": 8, "data": 16, "microbatches": 96},
        {"tensor": 8, "pipeline": 16, "data": 8, "microbatches": 192, "recompute": "full"},
        {"tensor": 4, "pipeline": 8, "data": 32, "microbatches": 48, "schedule": "interleaved", "chunks": 3},
        {"tensor": 8, "pipeline": 1, "data": 128, "microbatches": 12, "sharded": True, "sequence_parallel": True},
    ],
)
def test_many_prices_at_once_are_those_of_the_single_estimate(sizes):
    """Layers, messages, states and activations in columns are what the estimate of one layout charges for them."""
    layout = Layout(**sizes)
    cluster = Cluster.of(A100, layout.num_devices)
    one = estimate(GPT3, layout, cluster, MEGATRON)
    size = np.ones(3, np.int64)
    prices = (
        ModelPricing(GPT3, cluster, MEGATRON)
        .prices(
            Choices(
                tensor=size * layout.tensor,
                pipeline=size * layout.pipeline,
                data=size * layout.data,
                microbatch=size * layout.microbatch,
                routes=size,
                recompute=size * RECOMPUTE_CODES[layout.recompute],
                sequence_parallel=size > 2 - layout.sequence_parallel * 2,
                sharded=size > 2 - layout.sharded * 2,
            )
        )
        .at(1)
    )
    stages = len(one.costs.forward_s)
    blocks, exposed = 96 // stages, 2 * prices.hop_s * ((layout.chunks or 1) - 1) / (layout.chunks or 1)
    whole = 96 * prices.block_s.sum() + prices.embedding_s.sum() + prices.head_s.sum() + stages * exposed
    np.testing.assert_allclose(whole, sum(one.costs.forward_s) + sum(one.costs.backward_s), rtol=1e-9)
    np.testing.assert_allclose(
        blocks * prices.block_bytes, one.costs.activation_bytes[0] - (stages == 1) * prices.head_bytes
    )
    first = one.memory[0]
    states = 96 // layout.pipeline * prices.block_state_bytes + prices.embedding_state_bytes
    states += (layout.pipeline == 1) * prices.head_state_bytes
    np.testing.assert_allclose(states, first.weights + first.gradients + first.optimizer, rtol=1e-9)


def test_a_layout_of_another_size_than_the_cluster_is_refused():
    """The devices of layout and cluster have to be the same."""
    with pytest.raises(UsageError, match="--gpus 8"):
        estimate(GPT3, Layout(tensor=8), Cluster.of(A100, 16), MEGATRON)


def test_more_stages_than_blocks_are_infeasible():
    """A stage without a block is refused by name."""
    with pytest.raises(InfeasibleError, match="128 stages for 96 blocks"):
        estimate(GPT3, Layout(pipeline=128, microbatches=2), Cluster.of(A100, 128), MEGATRON)


@pytest.mark.parametrize("name", ["chimera", "zb-h1", "hanayo", "dualpipe", "pipedream-2bw"])
def test_an_estimate_holds_the_bounds_of_its_parts(name):
    """A step takes at least its busiest rank's time; memory is the sum of its parts, and recomputation lowers it."""
    shape = ModelShape(family="llama", hidden=2048, layers=16, heads=16, vocab=32000, seq=1024, gated=True)
    cluster = Cluster.of(A100, 8)
    kept = estimate(shape, Layout(pipeline=4, data=2, microbatches=16, schedule=name), cluster, MEGATRON)
    again = estimate(
        shape, Layout(pipeline=4, data=2, microbatches=16, schedule=name, recompute="full"), cluster, MEGATRON
    )
    assert kept.step_s >= sum(kept.compute_s.values()) * 0.999
    assert again.peak_bytes < kept.peak_bytes
    assert again.step_s > kept.step_s
    assert 0 <= kept.bubble_fraction < 1
