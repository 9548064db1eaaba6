"""``Pipeline`` as a user meets it: module lists, ties, batches, evaluation, accumulation, random streams, timelines."""

import hashlib

import pytest
import runtime_cases
import torch
from runtime_cases import SEED, hashable, make_layers, make_loss, make_schedule, microbatches, relative_error, snapshot
from runtime_oracle import run_layers, total_loss
from torch import nn
from torch.nn import functional

from chimera.ir.action import Kind, flatten
from chimera.ir.memory import peak_activations
from chimera.ir.timeline import Lane
from chimera.models.bert import bert_layers
from chimera.runtime.pipeline import Pipeline

TIGHT = 1e-12


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pipeline(group, layers, loss_fn, schedule, **options):
    return Pipeline(layers, schedule, loss_fn, group, timeout_s=20.0, **options)


def gradients_of(pipe):
    return snapshot({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})


def serial_gradients(layers, loss):
    """Return loss and gradients of a loss with a graph, under the names of ``nn.Sequential``."""
    loss.backward()
    named = nn.Sequential(*layers).named_parameters()
    return loss.item(), snapshot({name: p.grad for name, p in named if p.grad is not None})


def assert_same(results, loss, gradients):
    """Every rank has the loss; each gradient is on some rank, and equal wherever it is."""
    assert set().union(*(got for _, got in results)) == set(gradients)
    for got_loss, got in results:
        assert got_loss == pytest.approx(loss, rel=TIGHT)
        for name, array in got.items():
            assert relative_error(array, gradients[name]) < TIGHT, name


# Module lists


def plain_layers():
    """Layers of the user's own, two of them without parameters and one frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Flatten(), nn.Linear(4, 2)]
    layers[2].requires_grad_(requires_grad=False)
    return [layer.double() for layer in layers]


def plain_batch(samples):
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randn(samples, width, generator=generator, dtype=torch.float64) for width in (3, 2))


def run_plain(group, schedule, p, m, options):
    pipe = pipeline(group, plain_layers(), functional.mse_loss, make_schedule(schedule, p, m), **options)
    loss = pipe.step(*plain_batch(11))
    pipe.close()
    return loss.item(), gradients_of(pipe)


@pytest.mark.parametrize(
    ("schedule", "p", "options"),
    [
        ("gpipe", 2, {}),
        ("1f1b", 4, {"layer_to_stage": [0, 1, 2, 2, 3]}),  # stage 1 has no parameters, stage 2 none that train
        ("chimera-1-concatenate", 2, {"recompute": "full", "layer_to_stage": [0, 0, 0, 0, 1]}),
        ("text-forked", 3, {}),
    ],
)
def test_a_module_list_trains_as_one_batch(ranks, schedule, p, options):
    """A batch that m does not divide gives the loss and gradients of the whole batch; frozen parameters get none."""
    results = ranks.run(p, run_plain, schedule, p, 4, options)
    layers, (inputs, target) = plain_layers(), plain_batch(11)
    expected = serial_gradients(layers, functional.mse_loss(run_layers(layers, inputs), target))
    assert sorted(expected[1]) == ["0.bias", "0.weight", "4.bias", "4.weight"]
    assert_same(results, *expected)


def tied_layers():
    """Layers whose first and last share a weight, without bias, as do the second and third."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = [nn.Embedding(7, 6), *(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 7, bias=False)]
    layers[4].weight = layers[0].weight
    layers[2].bias = layers[1].bias
    return [layer.double() for layer in layers]


def token_loss(output, target):
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(7, (9, 3), generator=generator), torch.randint(7, (9, 3), generator=generator)


def run_tied(group, schedule, p):
    pipe = pipeline(group, tied_layers(), token_loss, make_schedule(schedule, p, 3))
    loss = pipe.step(*tokens())
    norm = pipe.gradient_norm()
    pipe.close()
    return loss.item(), gradients_of(pipe), norm


@pytest.mark.parametrize(
    ("schedule", "p"), [("1f1b", 1), ("1f1b", 4), ("interleaved", 2), ("chimera-1-double", 4), ("text-crossed", 2)]
)
def test_tied_weights_train_as_one(ranks, schedule, p):
    """A parameter of several stages has the sum of its uses as gradient on every holder, and counts once in the norm.

    It goes by its first name everywhere.
    """
    results = ranks.run(p, run_tied, schedule, p)
    layers, (inputs, target) = tied_layers(), tokens()
    loss, gradients = serial_gradients(layers, token_loss(run_layers(layers, inputs), target))
    assert "4.weight" not in gradients
    assert "2.bias" not in gradients
    assert_same([result[:2] for result in results], loss, gradients)
    norm = torch.linalg.vector_norm(torch.cat([torch.from_numpy(g).flatten() for g in gradients.values()])).item()
    assert [result[2] for result in results] == [pytest.approx(norm, rel=TIGHT)] * p


def names_and_stages(group):
    pipe = pipeline(group, make_layers("mlp"), functional.mse_loss, make_schedule("interleaved", 2, 2))
    pipe.close()
    return pipe.layer_to_stage, [name for name, _ in pipe.named_parameters()]


def test_parameters_are_named_as_in_the_whole_model(ranks):
    """Names carry global layer numbers; by default the first stages get the layers that are left over."""
    (layer_to_stage, first), (_, second) = ranks.run(2, names_and_stages)
    assert layer_to_stage == (0, 0, 0, 1, 1, 2, 2, 3, 3)
    names = {name for name, _ in nn.Sequential(*make_layers("mlp")).named_parameters()}
    assert set(first) | set(second) == names
    assert {name.split(".")[0] for name in first} == {"0", "1", "2", "5", "6"}
    assert set(first) & set(second) == set()


# Weights


def weights_on_meta(group, schedule, p, seed):
    with torch.device("meta"):
        layers = bert_layers(runtime_cases.bert_config())
    pipe = pipeline(group, layers, make_loss("bert"), make_schedule(schedule, p, 4), seed=seed)
    pipe.close()
    return snapshot(dict(pipe.named_parameters()))


def test_weights_on_the_meta_device_do_not_depend_on_the_layout(ranks):
    """Layers on the meta device are drawn from the seed alone: one hash over seven layouts, another for a new seed."""
    hashes = []
    layouts = [("1f1b", 1, 1, 3), ("1f1b", 4, 1, 3), ("gpipe", 2, 2, 3), ("interleaved", 4, 1, 3)]
    layouts += [("chimera-2-double", 4, 2, 3), ("text-lowered", 2, 2, 3), ("text-back", 2, 1, 3), ("1f1b", 2, 1, 4)]
    for schedule, p, d, seed in layouts:
        copies = {}
        for weights in ranks.run(p * d, weights_on_meta, schedule, p, seed):
            for name, array in weights.items():
                copies.setdefault(name, set()).add(hashable(array))
        assert all(len(different) == 1 for different in copies.values())
        assert len(copies) == len(runtime_cases.all_names("bert"))
        hashes.append(hashlib.sha256(repr(sorted(copies.items())).encode()).hexdigest())
    assert len(set(hashes[:-1])) == 1
    assert hashes[-1] != hashes[0]


def other_weights_on_each_rank(group):
    torch.manual_seed(group.rank())
    layers = [nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(3)]
    layers[3].running_mean[:] = group.rank()
    pipe = pipeline(group, layers, functional.mse_loss, make_schedule("chimera-1-concatenate", 2, 2))
    pipe.close()
    weights = snapshot(dict(pipe.named_parameters()))
    return {name: hashable(array) for name, array in weights.items()}, layers[3].running_mean.tolist()


def test_replicas_start_equal_whatever_each_rank_brought(ranks):
    """Parameters and buffers of a stage's replicas are those of its first holder."""
    first, second = ranks.run(2, other_weights_on_each_rank)
    assert first == second
    assert first[1] == [0.0, 0.0, 0.0]


# Evaluation


def train_with_evaluations(group, model, schedule, p, *, evaluations):
    """Train with evaluations before, between accumulation runs, and after; each has another number of micro-batches."""
    pipe = pipeline(group, make_layers(model), make_loss(model), make_schedule(schedule, p, 4), seed=SEED)
    numbers = iter((1, 2, 3, 5, 7, 4, 1))
    evaluated = []

    def evaluate():
        if evaluations:
            evaluated.append(pipe.evaluate(*microbatches(model, 99, range(next(numbers)))).item())

    optimizer = torch.optim.AdamW([p for _, p in pipe.optimizer_parameters()], **runtime_cases.ADAMW)
    d, data_rank, losses = group.size() // p, group.rank() % (group.size() // p), []
    counts = dict.fromkeys(("mlm", "nsp") if model == "bert" else ("loss",), 60.0)
    evaluate()
    for step in range(3):
        for run in range(2):
            first = (run * d + data_rank) * pipe.schedule.num_microbatches
            batch = microbatches(model, step, range(first, first + pipe.schedule.num_microbatches))
            losses.append(pipe.step(*batch, last=run == 1, counts=counts).item())
            evaluate()
        optimizer.step()
    pipe.close()
    return losses, evaluated, {name: hashable(a) for name, a in snapshot(dict(pipe.named_parameters())).items()}


@pytest.mark.parametrize(
    ("model", "schedule", "p", "d"),
    [("bert", "1f1b", 2, 2), ("mlp", "chimera-1-halve", 2, 1), ("bert", "interleaved", 2, 1)],
)
def test_evaluation_leaves_training_alone(ranks, model, schedule, p, d):
    """Losses and weights are the same bits with seven evaluations in between as with none."""
    with_them = ranks.run(p * d, train_with_evaluations, model, schedule, p, evaluations=True)
    without = ranks.run(p * d, train_with_evaluations, model, schedule, p, evaluations=False)
    assert [(losses, weights) for losses, _, weights in with_them] == [(ls, ws) for ls, _, ws in without]
    evaluated = [values for _, values, _ in with_them]
    assert evaluated == [evaluated[0]] * (p * d)
    assert len(set(evaluated[0])) == 7


def evaluate_once(group, model, schedule, p, *, number):
    """Evaluate before any training; then cut one tensor of two samples, fewer than the schedule's micro-batches."""
    pipe = pipeline(group, make_layers(model), make_loss(model), make_schedule(schedule, p, 4))
    loss = pipe.evaluate(*microbatches(model, 3, range(number)))
    terms = dict(pipe.terms)
    modes = [layer.training for layer in pipe._weights.layers.values()]
    short = pipe.evaluate(*plain_tensors()).item() if model == "mlp" else None
    pipe.close()
    return loss.item(), terms, short, modes


def plain_tensors():
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(2, width, generator=generator, dtype=torch.float64) for width in (5, 3))


@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize(
    ("model", "schedule", "p"),
    [("mlp", "1f1b", 4), ("bert", "chimera-2-concatenate", 4), ("tuple", "text-crossed", 2), ("tuple", "text-late", 2)],
)
def test_evaluation_equals_one_process_without_dropout(ranks, model, schedule, p, number):
    """The loss of any number of micro-batches is the serial one in evaluation mode, before any step; modes return."""
    results = ranks.run(p, evaluate_once, model, schedule, p, number=number)
    layers = [layer.eval() for layer in make_layers(model)]
    loss_fn = make_loss(model)
    with torch.no_grad():
        pairs = list(zip(*microbatches(model, 3, range(number)), strict=True))
        expected = float(total_loss(layers, loss_fn, pairs, [None] * number))
        short = functional.mse_loss(run_layers(layers, plain_tensors()[0]), plain_tensors()[1]) if model == "mlp" else 0
    assert expected > 0
    for loss, terms, on_short, modes in results:
        assert loss == pytest.approx(expected, rel=TIGHT)
        assert sum(terms.values()) == loss
        assert on_short is None or on_short == pytest.approx(short.item(), rel=TIGHT)
        assert all(modes)


# Accumulation


def accumulate(group, model, schedule, p, *, runs, counts):
    """Run one step of several runs; return loss so far after each, gradients, norm, and what the timelines name."""
    pipe = pipeline(group, make_layers(model), make_loss(model), make_schedule(schedule, p, 3), seed=SEED)
    m, d = pipe.schedule.num_microbatches, group.size() // p
    losses, names = [], []
    for run in range(runs):
        first = (run * d + group.rank() % d) * m
        batch = microbatches(model, 0, range(first, first + m))
        losses.append(pipe.step(*batch, last=run + 1 == runs, counts=counts and counts[group.rank() % d]).item())
        timeline = pipe.timeline()
        spans = [span for rank in range(p) for span in timeline.spans(rank) if span.lane is Lane.COMPUTE]
        names.append(sorted(str(span.action) for span in spans))
    norm = pipe.gradient_norm()
    step_number = pipe.step_number
    pipe.close()
    return losses, gradients_of(pipe), norm, names, step_number


def counts_per_replica(model, m, d, runs):
    """Return each replica's counts of every term over a whole step, and the serial pairs in order."""
    counts = [{} for _ in range(d)]
    for index in range(m * d * runs):
        target = microbatches(model, 0, [index])[1][0]
        replica = counts[index // m % d]
        counted = {"loss": len(target)} if model == "mlp" else make_loss(model).counts(target)
        for name, count in counted.items():
            replica[name] = replica.get(name, 0.0) + count
    return counts


@pytest.mark.parametrize(
    ("model", "schedule", "p", "d", "with_counts"),
    [
        ("mlp", "1f1b", 2, 2, False),
        ("mlp", "chimera-1-concatenate", 2, 1, True),
        ("bert", "interleaved", 2, 2, True),
        ("bert", "chimera-1-double", 2, 2, True),
        ("bert", "text-pairs", 2, 1, True),
    ],
)
def test_accumulated_runs_equal_one_batch(ranks, model, schedule, p, *, d, with_counts):
    """Three runs of m micro-batches, reduced at the last, equal one serial batch of them all; only the last counts."""
    runs, m = 3, make_schedule(schedule, p, 3).num_microbatches
    total = m * d * runs
    counts = counts_per_replica(model, m, d, runs) if with_counts else None
    results = ranks.run(p * d, accumulate, model, schedule, p, runs=runs, counts=counts)
    layers = make_layers(model)
    pairs = list(zip(*microbatches(model, 0, range(total)), strict=True))
    keys = [(0, index) for index in range(total)]
    loss, gradients = serial_gradients(layers, total_loss(layers, make_loss(model), pairs, keys))
    assert_same([(losses[-1], got) for losses, got, _, _, _ in results], loss, gradients)
    norm = sum(float((array**2).sum()) for array in gradients.values()) ** 0.5
    actions = [action for program in make_schedule(schedule, p, 3).actions for action in flatten(program)]
    computed = sorted(str(action) for action in actions if action.kind in {Kind.F, Kind.B})
    for _, _, got_norm, names, step_number in results:
        assert got_norm == pytest.approx(norm, rel=TIGHT)
        assert names == [computed] * runs
        assert step_number == 1


def accumulate_in_proportion(group):
    """Accumulate two terms whose counts double from run to run, without telling the counts."""
    pipe = pipeline(group, make_layers("tuple"), make_loss("tuple"), make_schedule("1f1b", 2, 2))
    targets = microbatches("tuple", 0, [0, 2])[1]
    for run in range(3):
        loss = pipe.step(microbatches("tuple", 2 * run, [0, 2])[0], targets, last=run == 2)
    pipe.close()
    return loss.item(), gradients_of(pipe)


def test_terms_that_grow_in_proportion_need_no_counts(ranks):
    """Gradients of earlier runs are weighed anew where every term's count grows by the same factor."""
    results = ranks.run(2, accumulate_in_proportion)
    layers = make_layers("tuple")
    targets = microbatches("tuple", 0, [0, 2])[1]
    pairs = [p for run in range(3) for p in zip(microbatches("tuple", 2 * run, [0, 2])[0], targets, strict=True)]
    keys = [(0, index) for index in range(6)]
    # The pipeline of this test keeps the default seed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime_oracle.SEED", 0)
        expected = serial_gradients(layers, total_loss(layers, make_loss("tuple"), pairs, keys))
    assert_same(results, *expected)


# Random streams, optimizers, numbers of micro-batches


def caller_stream(group):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.device("meta"):
        layers = bert_layers(runtime_cases.bert_config())
    pipe = pipeline(group, layers, make_loss("bert"), make_schedule("1f1b", 2, 3), recompute="full")
    batch = microbatches("bert", 0, range(3), torch.float32)
    pipe.step(*batch)
    pipe.evaluate(*batch)
    pipe.gradient_norm()
    pipe.close()
    return torch.equal(before, torch.get_rng_state())


def test_the_callers_random_stream_is_left_alone(ranks):
    """Making a pipeline, training and evaluating draw nothing from the generator that the caller seeded."""
    assert ranks.run(2, caller_stream) == [True, True]


def train_with_zero_grad(group, zero_grad, options):
    layers = make_layers("bert", torch.float32)
    pipe = pipeline(group, layers, make_loss("bert"), make_schedule("chimera-1-concatenate", 2, 2), **options)
    optimizer = torch.optim.AdamW([p for _, p in pipe.optimizer_parameters()], **runtime_cases.ADAMW)
    losses = []
    for step in range(3):
        losses.append(pipe.step(*microbatches("bert", step, range(2), torch.float32)).item())
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad(set_to_none=zero_grad == "none")
    pipe.close()
    return losses, [hashable(a) for a in snapshot(dict(pipe.named_parameters())).values()]


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"shard_optimizer": True}], ids=str)
def test_zero_grad_is_harmless(ranks, options):
    """The usual ``zero_grad`` of a training loop, in either form, changes nothing, and updates need no more than it."""
    plain = ranks.run(2, train_with_zero_grad, "", options)
    assert len(set(plain[0][0])) == 3
    assert ranks.run(2, train_with_zero_grad, "none", options) == plain
    assert ranks.run(2, train_with_zero_grad, "zero", options) == plain


def step_in_order(group, order, schedule):
    pipe = pipeline(group, make_layers("bert"), make_loss("bert"), make_schedule(schedule, 2, len(order)), seed=SEED)
    loss = pipe.step(*microbatches("bert", 0, order), microbatch_indices=order)
    pipe.close()
    return loss.item(), gradients_of(pipe)


def test_dropout_follows_the_number_a_micro_batch_is_given(ranks):
    """Micro-batches in another order, under their own numbers, make the same step."""
    layers = make_layers("bert")
    pairs = list(zip(*microbatches("bert", 0, range(4)), strict=True))
    keys = [(0, index) for index in range(4)]
    expected = serial_gradients(layers, total_loss(layers, make_loss("bert"), pairs, keys))
    for order, schedule in (([2, 0, 3, 1], "1f1b"), ([3, 2, 1, 0], "chimera-1-concatenate")):
        assert_same(ranks.run(2, step_in_order, order, schedule), *expected)


# Losses


def mean_of_uneven_micro_batches(group):
    pipe = pipeline(group, [nn.Identity(), nn.Identity()], functional.mse_loss, make_schedule("1f1b", 2, 2))
    inputs = [torch.tensor([[0.0]]), torch.tensor([[0.0], [0.0], [0.0]])]
    targets = [torch.tensor([[2.0]]), torch.tensor([[1.0], [1.0], [1.0]])]
    losses = pipe.step(inputs, targets).item(), pipe.evaluate(inputs, targets).item()
    pipe.close()
    return losses


def test_a_mean_weighs_a_micro_batch_by_its_samples(ranks):
    """One sample with error 4 and three with error 1 make a mean of 7/4; a model without parameters runs."""
    assert ranks.run(2, mean_of_uneven_micro_batches) == [(1.75, 1.75)] * 2


def without_labels(group, all_micro_batches):
    pipe = pipeline(group, make_layers("tuple"), make_loss("tuple"), make_schedule("1f1b", 2, 3))
    inputs, targets = microbatches("tuple", 0, range(3))
    for target in targets if all_micro_batches else targets[:1]:
        target["labels"][:] = runtime_cases.IGNORED
    loss = pipe.step(inputs, targets).item()
    terms = dict(pipe.terms)
    norm = pipe.gradient_norm()
    pipe.close()
    return loss, terms, norm


def test_micro_batches_without_labels_add_nothing(ranks):
    """A term without a single label in the step is 0, not NaN, and the other term and the gradients stay finite."""
    (some, _), (none, _) = (ranks.run(2, without_labels, flag) for flag in (False, True))
    assert some[1]["class"] > 0
    assert none[1]["class"] == 0
    assert none[1]["value"] == pytest.approx(some[1]["value"], rel=TIGHT)
    assert none[0] == none[1]["value"]
    assert 0 < none[2] < some[2] < 1e3


# Timelines


def measured(group, schedule, p, *, evaluation):
    pipe = pipeline(group, make_layers("mlp"), make_loss("mlp"), make_schedule(schedule, p, 4))
    batch = microbatches("mlp", 0, range(pipe.schedule.num_microbatches))
    pipe.step(*batch)
    if evaluation:
        pipe.evaluate(*batch)
    timeline = pipe.timeline()
    pipe.close()
    spans = [
        (span.rank, span.lane.name, str(span.action), span.start, span.end)
        for rank in range(p)
        for span in timeline.spans(rank)
    ]
    programs = [[str(action) for action in flatten(program)] for program in pipe.schedule.actions]
    held = timeline.peak_activations, peak_activations(pipe.schedule)
    return spans, timeline.unit, timeline.makespan, timeline.bubble_fraction, programs, held


@pytest.mark.parametrize(
    ("schedule", "p", "d"),
    [("1f1b", 1, 1), ("1f1b", 4, 1), ("chimera-1-concatenate", 2, 2), ("interleaved", 2, 1), ("text-pairs", 2, 1)],
)
def test_the_timeline_covers_every_action(ranks, schedule, p, d):
    """Each computation and send has one span, each receive one wait; they are in order, and hold what is held."""
    results = ranks.run(p * d, measured, schedule, p, evaluation=False)
    spans, unit, makespan, bubble, programs, (held, expected) = results[0]
    assert unit == "s"
    assert held == expected
    assert 0 < makespan < 20
    assert 0 <= bubble < 1
    at = {}
    for rank, lane, action, start, end in spans:
        assert 0 <= start <= end
        at.setdefault((rank, lane), {})[action] = (start, end)
    assert min(start for _, _, _, start, _ in spans) == 0
    for rank, program in enumerate(programs):
        compute = at[rank, "COMPUTE"]
        assert list(compute) == [action for action in program if "_" not in action]
        starts = [start for start, _ in compute.values()]
        assert starts == sorted(starts)
        assert set(at.get((rank, "SEND"), {})) == {action for action in program if "SEND" in action}
        assert set(at.get((rank, "RECEIVE"), {})) == {action for action in program if "RECV" in action}
        assert set(at[rank, "REDUCE"]) == {action for action in program if "REDUCE" in action}
    # Gradients of micro-batch 0 leave the last stage after its activations left the first.
    every = {action: when for (_, lane), actions in at.items() if lane == "COMPUTE" for action, when in actions.items()}
    last = max(int(action.split("F")[0]) for action in every if "F" in action)
    assert every["0F0"][1] <= every[f"{last}F0"][1] <= every[f"{last}B0"][1] <= every["0B0"][1]


def test_the_timeline_of_an_evaluation_holds_forwards_only(ranks):
    """After an evaluation the timeline is the evaluation's."""
    spans, *_ = ranks.run(2, measured, "1f1b", 2, evaluation=True)[0]
    computed = {(rank, action) for rank, lane, action, _, _ in spans if lane == "COMPUTE"}
    assert computed == {(rank, f"{rank}F{microbatch}") for rank in range(2) for microbatch in range(4)}
