"""The estimate of one layout, of many at once, and the folding of long steps, held against one another."""

import numpy as np
import pytest

from chimera.errors import ConfigError, FormatError, InfeasibleError, UsageError
from chimera.ir.costs import Costs
from chimera.plan.candidates import Candidates, estimate_many
from chimera.plan.estimating import estimate
from chimera.plan.folding import folded_step, simulated_step
from chimera.plan.forms import FORMS, FormSizes
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import known_devices, known_software, read_device, read_software, write_device
from chimera.plan.layout import Layout
from chimera.plan.shape import ModelShape
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


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "chimera", "looped-bfs", "gems", "zb-h1", "zb-v", "v-half"]
)
def test_closed_forms_give_the_makespans_that_are_simulated(name):
    """Idle time in closed form is that of the simulator for equal stages, within a fiftieth of the step."""
    ranks, microbatches = 4, 8
    form = FORMS[name]
    chunks = 2.0 if name in {"interleaved", "looped-bfs"} else 1.0
    sizes = FormSizes(4.0, 8.0, chunks, 1.0, forward=1.0, input_grad=1.0, weight_grad=1.0)
    timeline = simulate(build_schedule(name, ranks=ranks, microbatches=microbatches), Costs(forward=1.0, backward=2.0))
    predicted = microbatches * 3 + float(form.bubble(sizes))
    assert predicted == pytest.approx(timeline.makespan, rel=0.02)
    assert float(form.activations(sizes)) == pytest.approx(max(timeline.peak_activations), rel=0.02)


def test_every_schedule_has_a_closed_form():
    """No schedule of the registry is missing from the ranking of candidates."""
    assert set(FORMS) == set(SCHEDULES)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 8, "pipeline": 8, "data": 16, "microbatches": 96},
        {"tensor": 8, "pipeline": 16, "data": 8, "microbatches": 192, "recompute": "full"},
        {"tensor": 4, "pipeline": 8, "data": 32, "microbatches": 48, "schedule": "interleaved", "chunks": 3},
        {"tensor": 8, "pipeline": 1, "data": 128, "microbatches": 12, "sharded": True, "sequence_parallel": True},
    ],
)
def test_many_estimates_at_once_are_the_single_ones(sizes):
    """Columns of candidates in closed form give the time (0.5 %) and memory (0.1 %) of the simulated estimate."""
    layout = Layout(**sizes)
    cluster = Cluster.of(A100, layout.num_devices)
    one = estimate(GPT3, layout, cluster, MEGATRON)
    codes = {"none": 0.0, "selective": 1.0, "full": 2.0}
    columns = Candidates(
        *(
            np.full(3, value, np.float64)
            for value in (
                layout.tensor,
                layout.pipeline,
                layout.data,
                layout.chunks or 1,
                1,
                layout.microbatch,
                layout.microbatches,
                codes[layout.recompute],
                layout.sequence_parallel,
                layout.sharded,
            )
        )
    )
    many = estimate_many(GPT3, columns, cluster, MEGATRON, schedule="interleaved")
    np.testing.assert_allclose(many.step_s, one.step_s, rtol=5e-3)
    np.testing.assert_allclose(many.peak_bytes, one.peak_bytes, rtol=1e-3)


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
