"""On CUDA devices: messages by NCCL or staged through the CPU, gradients, and times by events."""

from itertools import pairwise

import pytest
import torch
from runtime_cases import make_schedule, relative_error, snapshot
from runtime_oracle import run_layers
from torch import nn
from torch.nn import functional

from chimera.ir.timeline import Lane
from chimera.runtime.pipeline import Pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLES = 12


def make_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).double() for _ in range(4)]


def batch():
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(SAMPLES, 16, generator=generator, dtype=torch.float64) for _ in range(2))


def train_on_device(group, schedule, backend):
    """Train one step with every rank on a device, the same one where there are fewer devices than ranks."""
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    options = {"device": device, "backend": backend, "timeout_s": 60.0}
    pipe = Pipeline(make_layers(), make_schedule(schedule, group.size(), 4), functional.mse_loss, group, **options)
    evaluated = pipe.evaluate(*batch()).item()
    loss = pipe.step(*batch()).item()
    norm = pipe.gradient_norm()
    spans = [tuple(span) for rank in range(group.size()) for span in pipe.timeline().spans(rank)]
    named = dict(pipe.named_parameters())
    pipe.close()
    assert all(parameter.device == device for parameter in named.values())
    gradients = snapshot({name: parameter.grad for name, parameter in named.items()})
    times = [(rank, int(lane), str(action), start, end) for rank, lane, action, start, end in spans]
    return loss, evaluated, norm, gradients, pipe.groups.staged_on_cpu, times


def assert_equal_to_the_cpu(results, *, staged):
    layers, (inputs, target) = make_layers(), batch()
    loss = functional.mse_loss(run_layers(layers, inputs), target)
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in nn.Sequential(*layers).named_parameters()}
    norm = sum(float((array**2).sum()) for array in gradients.values()) ** 0.5
    assert set().union(*(result[3] for result in results)) == set(gradients)
    for got, evaluated, got_norm, got_gradients, staged_on_cpu, _ in results:
        assert got == pytest.approx(loss.item(), rel=1e-9)
        assert evaluated == pytest.approx(loss.item(), rel=1e-9)
        assert got_norm == pytest.approx(norm, rel=1e-9)
        assert staged_on_cpu is staged
        for name, array in got_gradients.items():
            assert relative_error(array, gradients[name]) < 1e-9, name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "chimera-1-concatenate"])
def test_ranks_that_share_a_device_stage_messages_on_the_cpu(ranks, schedule):
    """Over gloo, messages and sums go through the CPU; losses and gradients are the CPU's own."""
    assert_equal_to_the_cpu(ranks.run(2, train_on_device, schedule, "gloo", timeout_s=180.0), staged=True)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "chimera-1-concatenate"])
def test_ranks_with_a_device_each_use_nccl(ranks, schedule):
    """Over NCCL, each channel has a communicator and a stream; without a backend named, it is what they use."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices; NCCL refuses two ranks on one")
    assert_equal_to_the_cpu(ranks.run(2, train_on_device, schedule, None, timeout_s=180.0), staged=False)


def test_one_rank_on_a_device_needs_no_messages(ranks):
    """A single rank trains on its device and times itself by events: spans are in order and not empty."""
    results = ranks.run(1, train_on_device, "interleaved", None, timeout_s=180.0)
    loss, _, _, _, _, times = results[0]
    assert loss > 0
    compute = [(action, start, end) for _, lane, action, start, end in times if lane == Lane.COMPUTE]
    assert [action for action, _, _ in compute][:2] == ["0F0", "1F0"]
    assert len(compute) == 16
    assert all(0 <= start < end < 120 for _, start, end in compute)
    assert all(end <= start + 1e-4 for (_, _, end), (_, start, _) in pairwise(compute))
