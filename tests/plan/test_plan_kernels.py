"""Times of single operations and messages, and what is read off measured runs rather than fitted."""

import json
from dataclasses import replace

import numpy as np
import pytest

from chimera.errors import FormatError
from chimera.plan.comparison import cluster_of
from chimera.plan.fit import measured_update_s
from chimera.plan.fit_columns import row_columns
from chimera.plan.hardware_file import read_device, read_software, write_device
from chimera.plan.kernels import all_reduce_s, network_share, waiting_s
from chimera.plan.layout import Layout
from chimera.plan.shape import ModelShape
from chimera.plan.step import Grid, hop_times
from chimera.plan.tables import FOUR_ADAPTERS, SELENE, MeasuredRow

A100 = read_device("a100-80")
DEEPSPEED = read_software("megatron-deepspeed")


def rates(machine, devices=64, software=DEEPSPEED):
    """Return the ceilings of a machine of the published tables."""
    return software.rates(cluster_of(A100, machine, devices))


@pytest.mark.parametrize(("tensor", "shared"), [(1, False), (2, True), (4, True), (8, False)])
def test_groups_that_share_adapters_share_their_rate(tensor, shared):
    """With 4 adapters for 8 devices rings and messages of t = 2 and 4 get a share of it; with 8 adapters none does."""
    few, many = rates(FOUR_ADAPTERS), rates(SELENE)
    share = float(few.shared_network_efficiency) if shared else 1.0
    assert float(network_share(few, tensor)) == share
    assert float(network_share(many, tensor)) == 1.0
    _, rate = hop_times(few, Grid(float(tensor), 4.0, 4.0))
    assert float(rate) == pytest.approx(tensor * float(few.network_rate) * share)
    ring = float(all_reduce_s(few, 1e9, 8.0, ranks_apart=tensor))
    unshared = float(all_reduce_s(few._replace(shared_network_efficiency=1.0), 1e9, 8.0, ranks_apart=tensor))
    assert ring > unshared if shared else ring == unshared


def test_a_given_message_rate_goes_before_the_links():
    """The composed single-node runs take 12.5 GiB/s for a whole message and nothing more, whatever t and the link."""
    composed = rates(FOUR_ADAPTERS, 8, read_software("single-node"))
    for tensor in (1.0, 2.0):
        latency, rate = hop_times(composed, Grid(tensor, 4.0, 1.0))
        assert (float(latency), float(rate)) == (0.0, 12.5 * 2**30)


def test_groups_wait_at_collectives():
    """A single rank waits for nobody; groups of three to seven have a constant of their own."""
    few = rates(FOUR_ADAPTERS)
    waits = waiting_s(few, np.array([1.0, 2.0, 4.0, 8.0, 16.0]))
    whole, four = float(few.collective_s), float(few.collective_of_four_s)
    np.testing.assert_allclose(waits, [0.0, whole, four, whole, whole])


def test_constants_that_a_device_may_lack_have_what_stands_in_for_them(tmp_path):
    """Without its own constant a group of four waits as others do."""
    constants = {name: value for name, value in A100.constants.items() if name != "collective_of_four_s"}
    write_device(replace(A100, constants=constants), tmp_path / "mine.json")
    mine = DEEPSPEED.rates(cluster_of(read_device(tmp_path / "mine.json"), SELENE, 8))
    assert mine.collective_of_four_s == mine.collective_s


@pytest.mark.parametrize(("lost", "added"), [("launch_s", None), (None, "lunch_s")])
def test_a_device_without_a_constant_or_with_an_unknown_one_is_refused(lost, added, tmp_path):
    """The message names the constant at fault."""
    path = tmp_path / "mine.json"
    write_device(A100, path)
    data = json.loads(path.read_text(encoding="utf-8"))
    if lost:
        del data["constants"][lost]
    if added:
        data["constants"][added] = data["constants"]["launch_s"]
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FormatError, match=lost or added):
        read_device(path)


def test_what_an_update_takes_is_read_off_runs_of_several_depths():
    """Steps that the model made tell the model's own update, to all digits."""
    software = read_software("single-node")
    rows = [
        MeasuredRow(
            label=f"{layers} {m}",
            shape=ModelShape(family="gpt", hidden=1024, layers=layers, heads=16, vocab=50257, seq=1024),
            layout=Layout(tensor=2, microbatch=b, microbatches=m),
            machine=FOUR_ADAPTERS,
            software="single-node",
            seconds=1.0,
        )
        for layers in (12, 24)
        for m in (2, 8)
        for b in (1, 2)
    ]
    columns = row_columns(rows, [rates(FOUR_ADAPTERS, 2, software)] * len(rows), {"single-node": software})
    constants = {name: one.value for name, one in A100.constants.items()}
    made = replace(columns, seconds=columns.predict(constants, {"single-node": {}}))
    expected = constants["optimizer_bytes"] / A100.memory_bytes_per_s
    assert measured_update_s(made, "single-node") == pytest.approx(expected, rel=1e-6)
