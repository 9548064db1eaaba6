"""What is left of a step when a single byte travels in place of messages or gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from chimera.runtime.ablation import OneByteLink
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule


class NotedLink:
    """Keeps what is sent and received; nothing travels."""

    in_background = True

    def __init__(self):
        self.passed = []

    def send(self, tensor):
        self.passed.append(("send", tensor.numel() * tensor.element_size()))

    def receive(self, tensor):
        self.passed.append(("receive", tensor.numel() * tensor.element_size()))


def test_a_link_carries_one_byte_and_gives_zeros():
    """Whatever the message's size and type, a byte goes each way and zeros are there."""
    noted = NotedLink()
    link, message = OneByteLink(noted), torch.full((3, 5), 7.0, dtype=torch.float64)
    link.send(message)
    assert message.unique().tolist() == [7.0]
    link.receive(message)
    assert message.unique().tolist() == [0.0]
    assert noted.passed == [("send", 1), ("receive", 1)]


def gradients_of(group, ablate, backend, *, sharded=False):
    """Make a step of two layers by Chimera, each on both ranks, and return the gradients kept here."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(2)]
    schedule = build_schedule("chimera", ranks=2, microbatches=4)
    options = {"ablate": ablate, "backend": backend, "shard_optimizer": sharded, "bucket_bytes": 64}
    pipe = Pipeline(layers, schedule, functional.mse_loss, group, **options)
    inputs = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        pipe.step(inputs, inputs.flip(0))
        found = {name: parameter.grad.numpy().copy() for name, parameter in pipe.optimizer_parameters()}
    pipe.close()
    return found


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_without_sums_each_replica_keeps_its_own_gradient(ranks, backend):
    """What the replicas keep adds up to the sum that they would have exchanged."""
    whole = ranks.run(2, gradients_of, "none", backend)[0]
    first, second = ranks.run(2, gradients_of, "allreduce", backend)
    assert any(abs(first[name] - second[name]).max() > 1e-3 for name in whole)
    for name, gradient in whole.items():
        assert first[name] + second[name] == pytest.approx(gradient, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_without_messages_stages_compute_on_zeros(ranks, backend):
    """No gradient comes back to the first stage, and the second one's inputs, by which its weights learn, are zeros."""
    for found in ranks.run(2, gradients_of, "p2p", backend):
        assert {name: abs(gradient).max() > 0 for name, gradient in found.items()} == {
            "0.weight": False,
            "0.bias": False,
            "1.weight": False,
            "1.bias": True,
        }


def test_with_sharded_states_both_can_be_left_out(ranks):
    """Gradients are scattered and weights gathered by the byte: the step ends, each replica with parts of its own."""
    first, second = ranks.run(2, gradients_of, "all", None, sharded=True)
    assert sum(gradient.size for found in (first, second) for gradient in found.values()) == 2 * (6 * 6 + 6)
