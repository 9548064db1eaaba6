"""Asynchronous schedules: delayed gradients by the papers' rules, versions of the weights, what is refused."""

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
    halves = [
        " ".join(f"{a.replace('B', 'I')} {a.replace('B', 'W')}" if "B" in a else a for a in r.split()) for r in rows
    ]
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
        recompute="full" if case["recompute"] else "none",
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

TWICE = """
    routes: 0 0
    0F0 1F0 0F1 1F1 1B0 0B0 0STEP 1STEP 1I1 0I1 0F2 1F2 1B2 0B2 0F3 1F3 1I3 0I3 0W1 1W1 1W3 0W3 1STEP 0STEP
"""


def small_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return [nn.Linear(3, 3).double(), Linear(3, 2).double()]


def batch(samples):
    generator = torch.Generator().manual_seed(samples)
    return [torch.randn(samples, width, generator=generator, dtype=torch.float64) for width in (3, 2)]


def descend(update):
    """Step down the gradient by a tenth."""
    with torch.no_grad():
        for _, parameter in update.parameters:
            parameter.sub_(0.1 * parameter.grad)


def alone(text=TWICE, update=descend, layers=None, **options):
    """Make a pipeline in this process."""
    return Pipeline(layers or small_layers(), from_text(text), functional.mse_loss, update=update, **options)


def gradients_at(layers, weighted):
    """Return the gradients of a weighted sum of losses, by name."""
    model = nn.Sequential(*layers)
    loss = sum(weight * functional.mse_loss(model(inputs), targets) for weight, (inputs, targets) in weighted)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def test_groups_of_unequal_size_weigh_their_own_samples():
    """Updates of one and of three micro-batches divide by their own counts; a backward takes its forward's weights."""
    seen = []

    def update(due):
        seen.extend((due.number, name, parameter.grad.clone()) for name, parameter in due.parameters)
        descend(due)

    inputs, targets = batch(8)
    pipe = alone(update=update)
    pipe.step(inputs, targets)
    old, moved = small_layers(), small_layers()
    first = gradients_at(old, [(1.0, (inputs[:2], targets[:2]))])
    with torch.no_grad():
        for name, parameter in nn.Sequential(*moved).named_parameters():
            parameter.sub_(0.1 * first[name])
    # Micro-batch 1 is part of update 1, but began on the weights before update 0.
    of_old = gradients_at(old, [(1 / 3, (inputs[2:4], targets[2:4]))])
    of_moved = gradients_at(moved, [(2 / 3, (inputs[4:], targets[4:]))])
    second = {name: of_old[name] + of_moved[name] for name in first}
    assert [(number, name) for number, name, _ in seen] == [
        *[(0, name) for name in ("0.weight", "0.bias", "1.weight", "1.bias")],
        *[(1, name) for name in ("1.weight", "1.bias", "0.weight", "0.bias")],
    ]
    for number, name, gradient in seen:
        torch.testing.assert_close(gradient, (first, second)[number][name], rtol=1e-12, atol=1e-14)


def test_the_loss_is_of_all_micro_batches_and_evaluation_takes_the_newest_weights():
    """A step returns Σ sum / Σ count of the losses as they were computed; evaluate has the last update's weights."""
    inputs, targets = batch(8)
    pipe = alone("routes: 0\n0F0 0F1 0B0 0B1 0STEP", layers=small_layers()[:1])
    whole = functional.mse_loss(small_layers()[0](inputs), inputs)
    assert pipe.step(inputs, inputs).item() == pytest.approx(whole.item(), rel=1e-12)
    (layer,) = (layer for layer in pipe._weights.layers.values())
    assert pipe.evaluate(inputs, inputs).item() == pytest.approx(functional.mse_loss(layer(inputs), inputs).item())
    assert pipe.evaluate(inputs, inputs) < whole
    assert targets.shape == (8, 2)


def test_parameters_stay_the_same_objects_whatever_fails():
    """An optimizer may hold on to them: after a step, and after a hook or layer that raises, modules have their own."""
    layers = small_layers()
    own = [parameter for layer in layers for parameter in layer.parameters()]

    def fail(update):
        raise FloatingPointError(update.stage)

    for update in (descend, fail):
        pipe = alone(update=update, layers=layers)
        if update is fail:
            with pytest.raises(FloatingPointError):
                pipe.step(*batch(8))
        else:
            pipe.step(*batch(8))
        now = [parameter for layer in layers for parameter in layer.parameters()]
        assert [id(parameter) for parameter in now] == [id(parameter) for parameter in own]
        assert [id(p) for _, p in pipe.named_parameters()] == [id(parameter) for parameter in own]


def test_a_frozen_parameter_and_a_stage_without_any_are_not_updated():
    """The hook is told of what trains alone, and not called where nothing does."""
    layers = [nn.Tanh(), small_layers()[1], small_layers()[0]]
    layers[2].weight.requires_grad_(requires_grad=False)
    told = []
    pipe = alone(
        "routes: 0 0 0\n0F0 1F0 2F0 2B0 1B0 0B0 0STEP 1STEP 2STEP",
        lambda update: told.append((update.stage, [name for name, _ in update.parameters])),
        [layers[0], layers[1], nn.Sequential(nn.Linear(2, 3).double(), layers[2])],
    )
    inputs, _ = batch(4)
    pipe.step(inputs, inputs)
    assert told == [(1, ["1.weight", "1.bias"]), (2, ["2.0.weight", "2.0.bias", "2.1.bias"])]


def test_a_weight_used_twice_in_one_stage_is_one_weight():
    """Layers of one stage may share a parameter: it has one gradient, and one copy per version."""
    layers = small_layers()[:1] * 2
    inputs, _ = batch(4)
    before = gradients_at(small_layers()[:1] * 2, [(1.0, (inputs[:2], inputs[:2]))])
    seen = []
    pipe = alone(
        "routes: 0\n0F0 0F1 0B0 0STEP 0B1 0STEP",
        lambda update: seen.append(update.parameters[0][1].grad.clone()),
        layers,
    )
    pipe.step(inputs, inputs)
    torch.testing.assert_close(seen[0], before["0.weight"], rtol=1e-12, atol=1e-14)


def test_narrow_weights_are_updated_in_full_precision():
    """With bf16 computation the hook gets fp32 weights and gradients, and the next version computes with their copy."""
    types = set()

    def update(due):
        types.update((parameter.dtype, parameter.grad.dtype) for _, parameter in due.parameters)
        descend(due)

    pipe = alone(update=update, dtype=torch.bfloat16)
    inputs, targets = (tensor.bfloat16() for tensor in batch(8))
    losses = [pipe.step(inputs, targets).item() for _ in range(5)]
    assert types == {(torch.float32, torch.float32)}
    assert losses == sorted(losses, reverse=True)
    full = dict(pipe.optimizer_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, full[name].bfloat16())


# Two routes, with a replica of each stage on both ranks; reductions are placed when it is lowered.
CROSSED = """
    routes: 0 1 | 1 0
    microbatches: 0 1 0 1
    versions: 0 0 0 0
    0F0 1F1 1B1 0B0 0F2 1F3 1STEP 0STEP 1B3 0B2 1STEP 0STEP
    0F1 1F0 1B0 0B1 0F3 1F2 1STEP 0STEP 1B2 0B3 1STEP 0STEP
"""


def run_crossed(group):
    seen = []

    def update(due):
        seen.extend((due.stage, due.number, name, p.grad.numpy().copy()) for name, p in due.parameters)
        descend(due)

    pipe = Pipeline(small_layers(), from_text(CROSSED), functional.mse_loss, group, update=update, timeout_s=20.0)
    pipe.step(*batch(8))
    timeline = pipe.timeline()
    pipe.close()
    kinds = [Kind(kind).name for kind in timeline.table.kind[timeline.rows(pipe.groups.pipeline_rank)]]
    return seen, snapshot(dict(pipe.named_parameters())), kinds


def test_replicas_on_two_routes_are_reduced_before_every_update(ranks):
    """Each update's gradient is the sum over both replicas, which stay equal; the timeline shows the updates."""
    results = ranks.run(2, run_crossed)
    inputs, targets = batch(8)
    halves = [gradients_at(small_layers(), [(1.0, (inputs[s], targets[s]))]) for s in (slice(4), slice(4, 8))]
    for seen, weights, kinds in results:
        assert [(stage, number) for stage, number, _, _ in seen[::2]] == [(1, 0), (0, 0), (1, 1), (0, 1)]
        for _, number, name, gradient in seen:
            assert relative_error(gradient, halves[number][name]) < 1e-12
        assert all((array == results[0][1][name]).all() for name, array in weights.items())
        assert kinds.count("STEP") == kinds.count("REDUCE_GRAD") == 4


# Refusals


def test_a_schedule_with_updates_needs_a_hook_and_others_take_none():
    """Either without the other is refused, saying what to do."""
    with pytest.raises(UsageError, match=r"'text' is asynchronous: .* needs update=, a function .* give one, or take"):
        alone(update=None)
    with pytest.raises(UsageError, match=r"update= is given, but schedule 'text' has no STEP .* leave update= out"):
        alone("routes: 0 0\n0F0 1F0 1B0 0B0")


def test_weights_shared_by_two_stages_are_refused():
    """No single STEP could update them; the message names the weight and its stages."""
    layers = [nn.Linear(3, 3).double(), nn.Linear(3, 3).double()]
    layers[1].weight = layers[0].weight
    with pytest.raises(UsageError, match=r"the weight 0.weight is shared by stages 0 and 1; untie it, put the layers"):
        alone(layers=layers)


@pytest.mark.parametrize("options", [{"last": False}, {"counts": {"loss": 8.0}}])
def test_accumulation_is_refused(options):
    """The weights change within each run, so that no gradient could wait for the next one."""
    with pytest.raises(
        UsageError, match=rf"{next(iter(options))}=.* is for gradients that accumulate over several runs"
    ):
        alone().step(*batch(8), **options)


def test_gradients_that_are_used_up_are_not_measured():
    """After a step there is no gradient left to clip or to measure; the hook is the place for that."""
    pipe = alone()
    pipe.step(*batch(8))
    with pytest.raises(UsageError, match=r"gradient_norm\(\) has no gradient to work on: .* ask in the hook"):
        pipe.gradient_norm()
    with pytest.raises(UsageError, match=r"scale_gradients\(\) has no gradient to work on"):
        pipe.scale_gradients(0.5)
