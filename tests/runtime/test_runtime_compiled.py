"""Compiled layers under split backward: the same gradients, in every schedule with I and W."""

import functools
import shutil
import warnings

import pytest
import torch
from runtime_cases import SEED, SPLIT, make_schedule, relative_error, snapshot
from torch import nn
from torch.nn import functional

from chimera.runtime.pipeline import Pipeline
from chimera.tensor.linear import Linear

NUM_BLOCKS, WIDTH, SAMPLES = 8, 4, 12
SCHEDULES = {**dict.fromkeys((*SPLIT, "zb-h2", "v-min", "chimera-zb"), 3), "dualpipe": 4, "dualpipev": 4}
"""Schedules with I and W on two ranks, and their numbers of micro-batches."""


class Block(nn.Module):
    """Has all that a split backward could lose.

    A weight of ours used twice, once apart from the input; frozen ones; one that no input reaches.
    """

    def __init__(self):
        super().__init__()
        self.wide = Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.alone = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        inner = functional.gelu(self.norm(self.wide(x)))
        return x + self.narrow(inner) + self.frozen(x) + self.wide.weight.mean() + functional.softplus(self.alone)


class PairedBlock(Block):
    """Runs a forward and a backward together, here the one after the other."""

    @classmethod
    def overlapped_forward_backward(cls, forward, backward):
        backward.run()
        return forward.run()


def blocks(cls):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return [cls().double() for _ in range(NUM_BLOCKS)]


def batch():
    generator = torch.Generator().manual_seed(SEED)
    return tuple(torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def compiled_steps(group, backend, cls, names, *, recompute):
    """Return for each schedule the loss and this rank's gradients, from compiled layers."""
    found = {}
    # The compiler imports and reads much that warns; the runtime's own warnings are errors in all other tests.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            layers = blocks(cls)
            for layer in layers:
                layer.compile(backend=backend)
            schedule = make_schedule(name, 2, SCHEDULES.get(name))
            pipe = Pipeline(layers, schedule, functional.mse_loss, group, recompute=recompute, timeout_s=60.0)
            loss = pipe.step(*batch()).item()
            pipe.close()
            found[name] = loss, snapshot({n: p.grad for n, p in pipe.named_parameters() if p.requires_grad})
    return found


@functools.cache
def plain_step():
    """Return the loss and gradients of the whole batch, of layers that are not compiled."""
    model = nn.Sequential(*blocks(Block))
    inputs, target = batch()
    loss = functional.mse_loss(model(inputs), target)
    loss.backward()
    return loss.item(), snapshot({name: p.grad for name, p in model.named_parameters() if p.requires_grad})


def assert_equal_when_compiled(ranks, backend, cls, names, *, recompute):
    torch.set_num_threads(1)
    loss, gradients = plain_step()
    results = ranks.run(2, compiled_steps, backend, cls, names, recompute=recompute, timeout_s=300.0)
    for name in names:
        assert set().union(*(rank[name][1] for rank in results)) == set(gradients)
        for rank in results:
            assert rank[name][0] == pytest.approx(loss, rel=1e-12)
            for parameter, gradient in rank[name][1].items():
                assert relative_error(gradient, gradients[parameter]) < 1e-12, (name, parameter)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_give_the_same_gradients_in_every_split_schedule(ranks, *, recompute):
    """Traced forward and backward, with what ours queue for W and what others make at I."""
    assert_equal_when_compiled(ranks, "aot_eager", Block, tuple(SCHEDULES), recompute=recompute)


def test_compiled_layers_run_together(ranks):
    """Pairs run by the layers' own form, with B and with I, of layers that are compiled."""
    names = ("text-pairs-split", "dualpipe")
    assert_equal_when_compiled(ranks, "aot_eager", PairedBlock, names, recompute="none")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_generated_code_gives_the_same_gradients_in_every_split_schedule(ranks, *, recompute):
    """The same by inductor's code, which reuses the memory of what a backward no longer needs."""
    assert_equal_when_compiled(ranks, "inductor", Block, tuple(SCHEDULES), recompute=recompute)
