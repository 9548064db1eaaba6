"""bf16 training: gradients are summed and weights are kept in fp32."""

import numpy as np
import pytest
import torch
from runtime_cases import SEED, make_layers, make_loss, make_schedule, microbatches, relative_error, snapshot
from runtime_oracle import serial_history
from torch import nn

from chimera.runtime.pipeline import Pipeline


class Ones(nn.Module):
    """Gives the sum of its weights times its input, so that every sample of ones adds 1 to each weight's gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x):
        return (x * self.weight).sum(-1, keepdim=True).expand(-1, 3)


def first_counts(output, target):
    """Sum over samples; the count is 1 for a whole step, so that nothing rounds."""
    return {"sum": (output[:, 0].sum(), float(target.sum()))}


def accumulate_ones(group):
    """One step of five runs of 64 micro-batches of ones."""
    pipe = Pipeline([Ones(), nn.Identity()], make_schedule("1f1b", 2, 64), first_counts, group, dtype=torch.bfloat16)
    for run in range(5):
        target = [torch.tensor([float(run == i == 0)]) for i in range(64)]
        pipe.step([torch.ones(1, 3, dtype=torch.bfloat16)] * 64, target, last=run == 4, counts={"sum": 1.0})
    pipe.close()
    return [(p.dtype, p.grad.dtype, p.grad.tolist()) for _, p in pipe.named_parameters()]


def test_gradients_of_bf16_weights_are_summed_in_fp32(ranks):
    """256 ones and 64 ones make 320, where bf16 would stay at 256."""
    first, second = ranks.run(2, accumulate_ones)
    assert first == [(torch.bfloat16, torch.float32, [320.0] * 3)]
    assert second == []
    assert (torch.tensor(256, dtype=torch.bfloat16) + 1).item() == 256


def train_narrow(group, schedule, p):
    """Train in bf16 for ten small steps; return the first step's loss and gradients, the main weights, and types."""
    options = {"dtype": torch.bfloat16, "seed": SEED, "timeout_s": 20.0}
    layers, schedule = make_layers("bert", torch.float32), make_schedule(schedule, p, 3)
    pipe = Pipeline(layers, schedule, make_loss("bert"), group, **options)
    pairs = pipe.optimizer_parameters()
    both = [(main, narrow) for (_, main), (_, narrow) in zip(pairs, pipe.named_parameters(), strict=True)]
    optimizer = torch.optim.AdamW([main for main, _ in both], lr=1e-5)
    first = None
    for step in range(10):
        loss = pipe.step(*microbatches("bert", step, range(schedule.num_microbatches)))
        gradients = snapshot({name: main.grad for name, main in pipe.optimizer_parameters()})
        first = first or (loss.item(), gradients)
        optimizer.step()
        pipe.publish_weights()
        assert all(torch.equal(main.bfloat16(), narrow) for main, narrow in both)
    pipe.close()
    return *first, snapshot(dict(pairs)), [(str(main.dtype), str(narrow.dtype)) for main, narrow in both]


@pytest.mark.parametrize(("schedule", "p"), [("1f1b", 2), ("chimera-1-concatenate", 2)])
def test_weights_are_kept_in_fp32_and_published_in_bf16(ranks, schedule, p):
    """Main weights and gradients are fp32, what computes is the weights' bf16 copy; ten steps of 1e-5 are not lost."""
    results = ranks.run(p, train_narrow, schedule, p)
    (serial,) = serial_history("bert", make_schedule(schedule, p, 3).num_microbatches, 1, torch.float32)
    start = dict(nn.Sequential(*make_layers("bert", torch.float32)).named_parameters())
    for loss, gradients, weights, types in results:
        assert set(types) == {("torch.float32", "torch.bfloat16")}
        assert loss == pytest.approx(serial["loss"], rel=0.02)
        for name, gradient in gradients.items():
            assert gradient.dtype == "float32"
            assert relative_error(gradient, serial["gradients"][name], floor=0.2 * serial["norm"]) < 0.1, name
        for name, array in weights.items():
            moved = np.abs(array - start[name].detach().numpy())
            # bf16 keeps 8 bits: next to 1, nothing below 0.002 would be noticed.
            assert 0.9e-5 < moved.max() < 2e-4, name


@pytest.mark.parametrize(
    ("own", "asked", "main"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float32),
        (torch.float64, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, None, torch.float32),
    ],
)
def test_weights_have_the_type_asked_for(own, asked, main):
    """Layers compute in the type asked for; what is updated is a copy only where that is narrower than fp32."""
    layer = nn.Linear(2, 2, dtype=own)
    layer.bias.requires_grad_(requires_grad=False)
    pipe = Pipeline([layer], make_schedule("gpipe", 1, 1), nn.functional.mse_loss, dtype=asked)
    pairs = list(zip(pipe.optimizer_parameters(), pipe.named_parameters(), strict=True))
    assert {parameter.dtype for _, (_, parameter) in pairs} == {asked or own}
    assert {original.dtype for (_, original), _ in pairs} == {main}
    assert [original.requires_grad for (_, original), _ in pairs] == [True, False]
    kept = main is not (asked or own)
    assert all((original is parameter) != kept for (_, original), (_, parameter) in pairs)
    inputs = torch.ones(1, 2, dtype=asked or own)
    pipe.step(inputs, inputs)
    before = pairs[0][0][1].detach().clone()
    torch.optim.AdamW([original for (_, original), _ in pairs], lr=1e-6).step()
    assert not torch.equal(pairs[0][0][1], before)
