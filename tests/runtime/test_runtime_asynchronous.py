"""Asynchronous schedules: delayed gradients as the papers' rules have them, versions of the weights, what is refused."""

from dataclasses import replace

import pytest
import runtime_cases
import torch
from runtime_cases import SEED, bert_config, make_loss, microbatches, relative_error, snapshot
from runtime_delayed import OPTIMIZERS, DelayedTraining
from torch import nn
from torch.nn import functional

from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.schedule import Schedule
from chimera.ir.text_form import from_text
from chimera.ir.versions import weight_versions
from chimera.models.bert import bert_layers
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule
from chimera.tensor.linear import Linear

TOLERANCE = 1e-9
STEPS = 2


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def layers_of(model):
    """Build the layers of a model whose stages share no weight."""
    if model != "bert":
        return runtime_cases.make_layers(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return [layer.double() for layer in bert_layers(replace(bert_config(), tied_decoder=False))]


def schedule_of(case):
    """Build a case's schedule; with ``split``, every backward as its I and its W."""
    options = {"updates": case["updates"]} if case["rule"] == "pipedream-2bw" else {}
    schedule = build_schedule(case["rule"], ranks=case["p"], microbatches=case["m"], **options)
    if not case.get("split"):
        return schedule
    rows = [" ".join(map(str, program)) for program in schedule.actions]
    halves = [" ".join(f"{a.replace('B', 'I')} {a.replace('B', 'W')}" if "B" in a else a for a in r.split()) for r in rows]
    split = Schedule.from_text(halves, routes=schedule.placement.routes)
    return replace(split, microbatch_to_version=schedule.microbatch_to_version)


class Recording:
    """An update hook: an optimizer per stage, the weights after each update, and how many versions there were."""

    def __init__(self, optimizer):
        self.make, self.optimizers, self.history, self.held, self.pipe = OPTIMIZERS[optimizer], {}, [], {}, None

    def __call__(self, update):
        if update.stage not in self.optimizers:
            self.optimizers[update.stage] = self.make([p for _, p in update.parameters])
        self.optimizers[update.stage].step()
        self.optimizers[update.stage].zero_grad()
        self.history.append((update.stage, update.number, snapshot(dict(update.parameters))))
        versions = self.pipe._updates._versions[update.stage]
        copies = [parameters[0] for parameters in versions._copies.values()]
        storages = {p.untyped_storage().data_ptr() for p in (versions._parameters[0], *copies)}
        self.held[update.stage] = max(self.held.get(update.stage, 0), len(storages))


def train(group, case):
    """Train on this rank; return the losses, the weights after each update and at the end, and versions held."""
    hook = Recording(case["optimizer"])
    schedule = schedule_of(case)
    pipe = Pipeline(
        layers_of(case["model"]),
        schedule,
        make_loss(case["model"]),
        group,
        layer_to_stage=case.get("layer_to_stage"),
        recompute=case["recompute"],
        seed=SEED,
        update=hook,
        timeout_s=30.0,
    )
    hook.pipe = pipe
    first = pipe.groups.data_rank * case["m"]
    losses = [
        pipe.step(*microbatches(case["model"], step, range(first, first + case["m"]))).item() for step in range(STEPS)
    ]
    pipe.close()
    kept = weight_versions(schedule)[pipe.groups.pipeline_rank]
    assert all(held == kept[stage] for stage, held in hook.held.items()), (hook.held, kept)
    assert all(not parameter.grad.any() for _, parameter in pipe.named_parameters())
    return losses, hook.history, snapshot(dict(pipe.named_parameters())), pipe.layer_to_stage


CASE = {"optimizer": "sgd", "recompute": False, "d": 1, "model": "mlp"}
SPREAD = [0, 0, 0, 1, 2, 2, 3, 3, 3]  # stage 1 has no parameters in the tuple model
CASES = [
    {**CASE, "rule": "pipedream", "p": 1, "m": 3},
    {**CASE, "rule": "pipedream", "p": 2, "m": 5, "optimizer": "adamw"},
    {**CASE, "rule": "pipedream", "p": 4, "m": 9, "optimizer": "adamw", "recompute": True, "model": "bert"},
    {**CASE, "rule": "pipedream", "p": 4, "m": 6, "model": "tuple", "layer_to_stage": SPREAD},
    {**CASE, "rule": "pipedream", "p": 3, "m": 6, "model": "bert", "split": True},
    {**CASE, "rule": "pipedream", "p": 2, "m": 4, "d": 2, "model": "bert"},
    {**CASE, "rule": "pipedream-2bw", "p": 1, "m": 4, "updates": 4},
    {**CASE, "rule": "pipedream-2bw", "p": 2, "m": 6, "updates": 3, "optimizer": "adamw", "model": "bert"},
    {**CASE, "rule": "pipedream-2bw", "p": 4, "m": 12, "updates": 3, "model": "tuple", "layer_to_stage": SPREAD},
    {**CASE, "rule": "pipedream-2bw", "p": 3, "m": 12, "updates": 4, "recompute": True, "model": "bert", "split": True},
    {**CASE, "rule": "pipedream-2bw", "p": 2, "m": 4, "updates": 2, "d": 2, "optimizer": "adamw", "model": "tuple"},
    {**CASE, "rule": "pipedream-2bw", "p": 3, "m": 5, "updates": 1},
]


def name_of(case):
    flags = [key for key in ("recompute", "split", "layer_to_stage") if case.get(key)]
    return "-".join(map(str, (case["rule"], f"p{case['p']}", f"m{case['m']}", f"d{case['d']}", case["model"], *flags)))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_update_is_that_of_the_delayed_rule(ranks, case):
    """Weights after every update, and losses, equal those of the update rule in one process."""
    results = ranks.run(case["p"] * case["d"], train, case)
    layer_to_stage = results[0][3]
    serial = DelayedTraining(layers_of(case["model"]), layer_to_stage, case["optimizer"], case["model"])
    each = 1 if case["rule"] == "pipedream" else case["m"] // case["updates"]
    updates, seen = case["m"] // each, set()
    for step in range(STEPS):
        loss = serial.step(step, case["rule"], case["m"], each, case["d"])
        for losses, history, _, _ in results:
            assert losses[step] == pytest.approx(loss, rel=TOLERANCE)
            for stage, number, weights in history:
                if number // updates == step:
                    seen.add((stage, number))
                    for name, array in weights.items():
                        layer, _, own = name.partition(".")
                        expected = serial.weights[int(layer)][number % updates + 1][own].detach().numpy()
                        assert relative_error(array, expected) < TOLERANCE, (stage, number, name)
    trained = {layer_to_stage[n] for n, layer in enumerate(serial.layers) if list(layer.parameters())}
    assert seen == {(stage, number) for stage in trained for number in range(STEPS * updates)}
    for _, history, final, _ in results:
        last = {name: array for _, _, weights in history for name, array in weights.items()}
        assert all((final[name] == array).all() for name, array in last.items())


# Schedules by hand


def small_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return [nn.Linear(3, 3).double(), Linear(3, 2).double()]


def batch(samples):
    generator = torch.Generator().manual_seed(samples)
    return [torch.randn(samples, width, generator=generator, dtype=torch.float64) for width in (3, 2)]


def alone(text, update, **options):
    return Pipeline(small_layers(), from_text(text), functional.mse_loss, update=update, **options)


def test_groups_of_unequal_size_weigh_their_own_samples():
    """Updates of one and of three micro-batches each divide by their own count, and W may come late in its update."""
    text = "routes: 0 0\n" + "0F0 1F0 0F1 1F1 1B0 0B0 0STEP 1STEP 1I1 0I1 0F2 1F2 1B2 0B2 0F3 1F3 1I3 0I3 0W1 1W1 1W3 0W3 1STEP 0STEP"
    gradients = []

    def update(due):
        for name, parameter in due.parameters:
            gradients.append((due.number, name, parameter.grad.clone()))
            parameter.data.sub_(0.1 * parameter.grad)

    inputs, targets = batch(8)
    alone(text, update).step(inputs, targets)
    layers, newest = small_layers(), small_layers()
    parts = [(inputs[:2], targets[:2], None), (inputs[2:4], targets[2:4], None), (inputs[4:], targets[4:], "newest")]
    model, moved = nn.Sequential(*layers), nn.Sequential(*newest)
    functional.mse_loss(model(inputs[:2]), targets[:2]).backward()
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    for (name, p), (_, q) in zip(model.named_parameters(), moved.named_parameters(), strict=True):
        q.data.sub_(0.1 * first[name])
        p.grad = None
    old = functional.mse_loss(model(inputs[2:4]), targets[2:4]) * 2
    (old / 6).backward()
    (functional.mse_loss(moved(inputs[4:]), targets[4:]) * 4 / 6).backward()
    second = {n: p.grad + q.grad for (n, p), (_, q) in zip(model.named_parameters(), moved.named_parameters(), strict=True)}
    assert len(parts) == 3
    for number, name, gradient in gradients:
        torch.testing.assert_close(gradient, (first, second)[number][name], rtol=1e-12, atol=1e-14)
    assert [(number, name[0]) for number, name, _ in gradients] == [(0, "0")] * 2 + [(0, "1")] * 2 + [(1, "1")] * 2 + [(1, "0")] * 2
