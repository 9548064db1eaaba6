"""Updates over all ranks: one norm and one factor, overflow, LAMB over stages and shards, and reloading."""

import math
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from chimera.errors import ConfigError
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule
from chimera.tensor.portion import Portion
from chimera.train.checkpoint import latest_checkpoint, save_checkpoint
from chimera.train.loss_scale import LossScale, LossScaleOptions
from chimera.train.lr_schedules import LearningRate
from chimera.train.optimizers import OptimizerConfig, build_optimizer
from chimera.train.state import owned_state, restore
from chimera.train.updating import AfterStep

RATE = LearningRate(total_steps=10, decay="constant")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Weighted(nn.Module):
    """Adds Σ cᵢ·wᵢ to what passes, so that the gradient of w is c times that of the output."""

    def __init__(self, coefficients, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(coefficients))) if weight is None else weight
        self.register_buffer("coefficients", torch.tensor(coefficients))

    def forward(self, x):
        return x + (self.weight * self.coefficients).sum()


def first_element(output, target):
    """Return one term whose gradient is 1 on the output of one sample."""
    return {"sum": (output.sum(), float(len(target)))}


def pipeline(group, layers, *, schedule="1f1b", p=2, m=2, loss=first_element, **options):
    made = build_schedule(schedule, ranks=p, microbatches=m)
    return Pipeline(layers, made, loss, group, timeout_s=20.0, **options)


def updater(pipe, options, rate=RATE, loss_scale=None):
    made = AfterStep(options, rate, loss_scale)
    made.build(pipe)
    return made


def ones(m):
    return [torch.ones(1, 1)] * m


def sgd(**options):
    return OptimizerConfig(name="sgd", learning_rate=1.0, weight_decay=0.0, **options)


# One norm, one factor


def clipped(group, schedule, *, tied, shard):
    """Return norm and clipped update of weights whose gradients are known."""
    if tied:
        weight = nn.Parameter(torch.ones(2))
        layers = [Weighted([10.0, 10.0], weight), Weighted([10.0, 10.0], weight)]
    else:
        layers = [Weighted([3.0, 4.0]), Weighted([12.0, 0.0])]
    pipe = pipeline(group, layers, schedule=schedule, shard_optimizer=shard)
    updates = updater(pipe, sgd(clip_norm=1.0), RATE)
    pipe.step(ones(2), ones(2))
    update = updates.measure()
    updates.finish(update)
    pipe.close()
    return update.norm, {name: (1 - p).tolist() for name, p in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "n", "shard"), [("1f1b", 2, False), ("1f1b", 4, True), ("chimera", 2, False), ("chimera", 4, True)]
)
def test_stages_share_one_norm_and_one_factor(ranks, schedule, n, shard):
    """Gradients [3, 4] and [12, 0] have the norm 13 on every rank, and both are divided by it."""
    for norm, moved in ranks.run(n, clipped, schedule, tied=False, shard=shard):
        assert norm == 13.0
        for name, step in moved.items():
            expected = {"0.weight": [3.0, 4.0], "1.weight": [12.0, 0.0]}[name]
            assert step == pytest.approx([value / 13 for value in expected], rel=1e-6)


@pytest.mark.parametrize(("schedule", "n", "shard"), [("1f1b", 2, False), ("1f1b", 2, True), ("chimera", 4, True)])
def test_a_tied_weight_counts_once(ranks, schedule, n, shard):
    """A weight of two stages whose gradient has the squared sum 800 gives the norm 28.284, on both holders."""
    for norm, moved in ranks.run(n, clipped, schedule, tied=True, shard=shard):
        assert norm == pytest.approx(math.sqrt(800), rel=1e-12)
        assert moved == {"0.weight": pytest.approx([20 / math.sqrt(800)] * 2, rel=1e-6)}


def gradients_of_equal_counts(group, schedule, m):
    """Return the gradients of a step of m micro-batches that add 1, 2, 3…, each with as many labels."""

    class Scaled(Weighted):
        def forward(self, x):
            return x + (self.weight * self.coefficients).sum() * x.detach()

    pipe = pipeline(group, [Scaled([1.0, 2.0]), nn.Identity()], schedule=schedule, m=m)
    inputs = [torch.full((1, 1), float(2**k)) for k in range(m)]
    pipe.step(inputs, inputs)
    pipe.close()
    return [p.grad.tolist() for _, p in pipe.named_parameters()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera", "zb-h1"])
def test_with_equal_counts_a_gradient_is_the_sum_divided_by_m(ranks, schedule):
    """Four micro-batches that add 1, 2, 4 and 8 give exactly 15 / 4 times the coefficients, unclipped."""
    gradients = [g for rank in ranks.run(2, gradients_of_equal_counts, schedule, 4) for g in rank]
    assert gradients == [[15 / 4, 15 / 2]] * len(gradients)
    assert gradients


# Overflow


class Overflows(nn.Module):
    """Has a weight whose gradient overflows fp16 where the step's input says so, before it reaches any other stage."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        # What other stages get is x itself; only this weight's gradient is multiplied.
        return x + (self.weight - self.weight.detach()) * x.detach() * 60_000.0


def train_in_fp16(group, schedule, *, shard):
    """Train four steps of which the second overflows on the first stage alone; return what happened."""
    layers = [Overflows(), nn.Linear(1, 1), nn.Linear(1, 1)]
    for layer in layers[1:]:
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
    pipe = pipeline(group, layers, schedule=schedule, dtype=torch.float16, shard_optimizer=shard)
    learning_rate = LearningRate(total_steps=4, warmup_steps=4)
    options = LossScaleOptions(initial=4.0, growth_interval=2)
    updates = updater(pipe, OptimizerConfig(learning_rate=1e-2, clip_norm=1.0), learning_rate, options)
    history = []
    for step in range(4):
        large = step == 1
        inputs = [torch.full((1, 1), 16.0 if large else 2**-14, dtype=torch.float16)] * 2
        pipe.step(inputs, inputs, loss_scale=updates.begin())
        update = updates.measure()
        before = {p.name: p.parameter.detach().clone() for p in pipe.portions()}
        updates.finish(update)
        still = [torch.equal(before[p.name], p.parameter) for p in pipe.portions()]
        history.append((update.updates, update.loss_scale, update.rate, math.isfinite(update.norm), still))
    counts = {float(state["step"]) for state in updates.optimizers[0].state.values()}
    pipe.close()
    return history, counts, updates.progress


@pytest.mark.parametrize(("schedule", "n", "shard"), [("1f1b", 2, False), ("1f1b", 4, True), ("chimera", 2, True)])
def test_an_overflow_on_one_stage_skips_the_step_on_all(ranks, schedule, n, shard):
    """Nobody moves, the scale halves, and rate and counts go on as without the step; two good steps double it."""
    for history, counts, progress in ranks.run(n, train_in_fp16, schedule, shard=shard):
        assert [made for made, *_ in history] == [True, False, True, True]
        assert [scale for _, scale, *_ in history] == [4.0, 4.0, 2.0, 2.0]
        assert [rate for _, _, rate, *_ in history] == pytest.approx([0.0025, 0.005, 0.005, 0.0075])
        assert [finite for *_, finite, _ in history] == [True, False, True, True]
        for made, *_, still in history:
            assert still == [not made] * len(still)
        assert counts <= {3.0}
        assert (progress.updates, progress.loss_scale) == (3, LossScale(4.0, 0))


def test_the_scale_never_falls_below_one():
    """At 1 an overflow is no matter of the scale, which the loop then says."""
    assert LossScale(1.5).after(LossScaleOptions(), overflow=True) == LossScale(1.0)
    assert LossScale(1.0).is_least
    assert not LossScale(2.0).is_least


@pytest.mark.parametrize(
    ("options", "message"),
    [({"initial": 0.5}, r"initial = 0.5 must be"), ({"growth_interval": 0}, r"growth_interval = 0 must be at least 1")],
)
def test_a_wrong_scale_is_refused_by_option(options, message):
    """Every wrong option is named with its section."""
    with pytest.raises(ConfigError, match=r"\[loss_scale\] " + message):
        LossScaleOptions(**options)


def small_gradient_in_fp16(loss_scale):
    """Return the gradient of a weight far below what fp16 can hold, on this process alone."""
    layers = [Weighted([1.0]), nn.Identity()]
    pipe = Pipeline(
        layers,
        build_schedule("gpipe", ranks=1, microbatches=1),
        lambda output, _: {"sum": (output.sum(), 2.0**26)},
        dtype=torch.float16,
    )
    pipe.step(ones(1), ones(1), loss_scale=loss_scale)
    pipe.scale_gradients(1 / loss_scale)
    return [portion.parameter.grad.item() for portion in pipe.portions()]


def test_a_loss_scale_keeps_what_fp16_would_lose():
    """A gradient of 2⁻²⁶ is zero in fp16, and exact where the loss is multiplied and the gradient divided again."""
    assert small_gradient_in_fp16(1.0) == [0.0]
    assert small_gradient_in_fp16(2.0**16) == [2.0**-26]


# LAMB over stages and shards


def make_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [nn.Linear(a, b, dtype=torch.float64) for a, b in ((4, 6), (6, 5), (5, 7), (7, 3))]


def batch(step, number):
    generator = torch.Generator().manual_seed(100 * step + number)
    return [torch.randn(2, width, generator=generator, dtype=torch.float64) for width in (4, 3)]


def train_lamb(group, schedule, p, *, shard):
    """Train four clipped steps with LAMB; return norms and weights."""
    pipe = pipeline(
        group,
        make_layers(),
        schedule=schedule,
        p=p,
        m=4,
        loss=functional.mse_loss,
        shard_optimizer=shard,
        bucket_bytes=200,
    )
    updates = updater(pipe, OptimizerConfig(name="lamb", learning_rate=0.05, weight_decay=0.1, clip_norm=0.3), RATE)
    d, norms = group.size() // p, []
    for step in range(4):
        first = 4 * (group.rank() % d)
        inputs, targets = zip(*(batch(step, first + number) for number in range(4)), strict=True)
        pipe.step(list(inputs), list(targets))
        update = updates.measure()
        norms.append(update.norm)
        updates.finish(update)
    pipe.close()
    return norms, {name: p.detach().numpy().copy() for name, p in pipe.named_parameters()}


def serial_lamb(number):
    """Train the same in one process: one norm over both groups of all layers."""
    layers = make_layers()
    model, norms = nn.Sequential(*layers), []
    optimizer = build_optimizer(
        OptimizerConfig(name="lamb", learning_rate=0.05, weight_decay=0.1),
        [Portion.whole(name, parameter) for name, parameter in model.named_parameters()],
    )
    for step in range(4):
        inputs, targets = zip(*(batch(step, index) for index in range(number)), strict=True)
        optimizer.zero_grad()
        functional.mse_loss(model(torch.cat(inputs)), torch.cat(targets)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    return norms, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "p", "d", "shard"),
    [("1f1b", 2, 1, False), ("1f1b", 2, 2, True), ("chimera", 4, 1, True), ("chimera", 2, 2, True)],
)
def test_lamb_on_stages_and_shards_equals_one_process(ranks, schedule, p, d, shard):
    """Two groups on several stages are clipped by one norm, and trust ratios are those of whole parameters."""
    expected_norms, expected = serial_lamb(4 * d)
    results = ranks.run(p * d, train_lamb, schedule, p, shard=shard)
    assert set().union(*(weights for _, weights in results)) == set(expected)
    assert min(expected_norms) > 0.3
    for norms, weights in results:
        # torch's clipping divides by the norm plus 1e-6.
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, expected[name], rtol=1e-5, atol=1e-7)


# Reloading


def train_and_save(group, folder, schedule, p, *, shard, name, dtype, first, last, d):
    """Go on from the newest checkpoint, train steps ``first`` to ``last`` and save; return losses and weights."""
    precision = getattr(torch, dtype)
    layers = [layer.to(torch.float32) for layer in make_layers()]
    pipe = pipeline(
        group,
        layers,
        schedule=schedule,
        p=p,
        m=8 // d,
        loss=functional.mse_loss,
        shard_optimizer=shard,
        bucket_bytes=200,
        dtype=precision,
    )
    options = OptimizerConfig(name=name, learning_rate=0.05, **({"momentum": 0.9} if name == "sgd" else {}))
    scale = LossScaleOptions(initial=8.0, growth_interval=3) if dtype == "float16" else None
    updates = updater(pipe, options, LearningRate(total_steps=8, warmup_steps=2), scale)
    if first:
        restore(pipe, updates, latest_checkpoint(Path(folder)))
    restored = {name: p.detach().float().numpy().tobytes() for name, p in pipe.named_parameters()}
    losses = []
    for step in range(first, last):
        start = 8 // d * (group.rank() % d)
        inputs, targets = zip(*(batch(step, start + number) for number in range(8 // d)), strict=True)
        inputs, targets = ([tensor.to(precision) for tensor in side] for side in (inputs, targets))
        losses.append(pipe.step(inputs, targets, loss_scale=updates.begin()).item())
        updates.finish(updates.measure())
    description = {"progress": asdict(updates.progress)}
    save_checkpoint(Path(folder), last, owned_state(pipe, updates), description, pipe.groups, keep=9)
    pipe.close()
    weights = {name: p.detach().float().numpy().tobytes() for name, p in pipe.named_parameters()}
    return losses, weights, restored, updates.progress


LAYOUTS = [
    {"schedule": "chimera", "p": 2, "d": 2, "shard": True},
    {"schedule": "1f1b", "p": 2, "d": 1, "shard": False},
    {"schedule": "1f1b", "p": 4, "d": 2, "shard": True},
    {"schedule": "chimera", "p": 4, "d": 1, "shard": True},
]


def run(ranks, folder, layout, **options):
    return ranks.run(layout["p"] * layout["d"], train_and_save, str(folder), **layout, **options)


@pytest.mark.parametrize(("name", "dtype"), [("adamw", "float32"), ("lamb", "float16"), ("sgd", "bfloat16")])
def test_sharded_training_resumes_bit_for_bit(ranks, tmp_path, name, dtype):
    """Three steps, a reload and three more give the bits of six in a row; replicas are equal after the reload."""
    options = {"name": name, "dtype": dtype}
    whole = run(ranks, tmp_path / "whole", LAYOUTS[0], first=0, last=6, **options)
    before = run(ranks, tmp_path / "broken", LAYOUTS[0], first=0, last=3, **options)
    after = run(ranks, tmp_path / "broken", LAYOUTS[0], first=3, last=6, **options)
    for unbroken, first, second in zip(whole, before, after, strict=True):
        assert unbroken[0] == first[0] + second[0]
        assert second[2] == first[1]
        assert second[1] == unbroken[1]
        assert second[3] == unbroken[3]
    copies = {}
    for _, _, restored, _ in after:
        for parameter, data in restored.items():
            copies.setdefault(parameter, set()).add(data)
    assert [len(different) for different in copies.values()] == [1] * 8


def test_a_sharded_checkpoint_loads_under_another_layout(ranks, tmp_path):
    """Another number of replicas or pairs, and no sharding, go on with the same weights, moments and losses."""
    options = {"name": "adamw", "dtype": "float32"}
    whole = run(ranks, tmp_path / "whole", LAYOUTS[0], first=0, last=6, **options)
    saved = run(ranks, tmp_path / "saved", LAYOUTS[0], first=0, last=3, **options)
    weights = {name: data for _, held, _, _ in saved for name, data in held.items()}
    for number, layout in enumerate(LAYOUTS[1:]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "saved", folder)
        results = run(ranks, folder, layout, first=3, last=6, **options)
        for losses, _, restored, _ in results:
            assert restored.items() <= weights.items()
            assert losses == pytest.approx(whole[0][0][3:], rel=1e-5)
