"""Pairs of a forward and a backward: run together by the layers' own form where they have one, else one by one."""

from typing import ClassVar

import pytest
import torch
from runtime_cases import (
    SEED,
    PairedMix,
    make_layers,
    make_loss,
    make_schedule,
    microbatches,
    relative_error,
    train,
)
from runtime_oracle import serial_history
from torch import nn
from torch.nn import functional

from chimera.errors import RunError, ScheduleError, UsageError
from chimera.ir.action import Overlap
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.runnable import runnable

TOLERANCE = 1e-9
STEPS = 3


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# Equal to one process


def train_in_pairs(group, case):
    """Train; return the history and how often two layers ran together here."""
    PairedMix.together = 0
    history = train(group, case, STEPS)
    return history, PairedMix.together


def pairs_met(schedule, layers, rank):
    """Return how many pairs of layers with a form meet in one step on a rank."""
    per_stage = torch.arange(len(layers)).tensor_split(schedule.num_stages)
    with_form = [sum(isinstance(layers[n], PairedMix) for n in numbers) for numbers in per_stage]
    pairs = [i for i in schedule.actions[rank] if isinstance(i, Overlap)]
    return sum(min(with_form[pair.forward.stage], with_form[pair.backward.stage]) for pair in pairs)


CASES = [
    ("text-pairs", 2, None, 1, False),
    ("text-pairs", 2, None, 2, True),
    ("text-pairs-split", 2, None, 1, False),
    ("text-pairs-split", 2, None, 1, True),
    ("dualpipe", 2, 6, 2, False),
    ("dualpipe", 4, 8, 1, True),
    ("dualpipev", 2, 5, 1, False),
]


@pytest.mark.parametrize(("schedule", "p", "m", "d", "recompute"), CASES)
def test_pairs_in_their_own_form_equal_one_process(ranks, schedule, p, m, d, *, recompute):
    """Loss, norm, gradients and weights of three steps equal the serial run; all layers that meet ran together."""
    case = {"model": "paired", "schedule": schedule, "p": p, "m": m, "d": d, "reduce": "eager", "shard": d > 1}
    case["recompute"] = "full" if recompute else "none"
    results = ranks.run(p * d, train_in_pairs, case)
    built = make_schedule(schedule, p, m)
    serial = serial_history("paired", built.num_microbatches * d, STEPS)
    for rank, (history, together) in enumerate(results):
        assert together == STEPS * pairs_met(built, make_layers("paired"), rank // d) > 0
        for got, expected in zip(history, serial, strict=True):
            for quantity in ("loss", "norm"):
                assert relative_error(got[quantity], expected[quantity]) < TOLERANCE
            for name, gradient in got["gradients"].items():
                floor = 1e-3 * expected["norm"]
                assert relative_error(gradient, expected["gradients"][name], floor) < TOLERANCE, name
                assert relative_error(got["weights"][name], expected["weights"][name]) < TOLERANCE, name


# On a rank of its own: what follows needs no peer

ALONE = Schedule.from_text(["0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0B0)OVERLAP_F_B 1B1 0B1"], routes=[[0, 0]])


class PairedLinear(nn.Linear):
    """Notes in ``log`` what it runs together; ``wrong`` says in which way it fails."""

    log: ClassVar[list] = []
    wrong = ""

    @classmethod
    def overlapped_forward_backward(cls, forward, backward):
        cls.log.append((forward.layer.number, backward.layer.number))
        if cls.wrong == "raises":
            raise ValueError("no such stream")
        if cls.wrong != "forgets":
            backward.run()
        return None if cls.wrong == "gives nothing" else forward.run()


class OtherPairedLinear(PairedLinear):
    """Another class, with its own form."""

    log = PairedLinear.log


def layers_of(*classes):
    """Return double layers of 4 to 4 features, numbered, the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers = [cls() if cls in {nn.Tanh, nn.ReLU} else cls(4, 4) for cls in classes]
    for number, layer in enumerate(layers):
        layer.number = number
    return [layer.double() for layer in layers]


def batch():
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))


def run_alone(monkeypatch, layers, cut, *, wrong="", runs=1):
    """Run a step on one rank; return the pipeline, its loss, and which layers ran together."""
    monkeypatch.setattr(PairedLinear, "log", [])
    monkeypatch.setattr(OtherPairedLinear, "log", PairedLinear.log)
    monkeypatch.setattr(PairedLinear, "wrong", wrong)
    pipe = Pipeline(layers, ALONE, functional.mse_loss, layer_to_stage=cut)
    for run in range(runs):
        loss = pipe.step(*batch(), last=run + 1 == runs)
    return pipe, loss, PairedLinear.log


def assert_equal_gradients(pipe, loss, make, runs=1):
    """Compare with one plain backward over the whole batch, as often as it ran."""
    layers = make()
    inputs, target = batch()
    expected = functional.mse_loss(nn.Sequential(*layers)(inputs), target)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    named = dict(nn.Sequential(*layers).named_parameters())
    for name, parameter in pipe.named_parameters():
        if parameter.requires_grad:
            assert relative_error(parameter.grad.numpy(), named[name].grad.numpy()) < 1e-12, name
    assert {name for name, p in pipe.named_parameters() if p.requires_grad} == {
        n for n in named if named[n].grad is not None
    }


P, Q, L = PairedLinear, OtherPairedLinear, nn.Linear


@pytest.mark.parametrize(
    ("classes", "cut", "met"),
    [
        # The first of the forward's stage with the last of the backward's; then the second with the last but one.
        ((P, P, P, P), (0, 0, 1, 1), [(0, 3), (1, 2), (2, 1), (3, 0)]),
        # What has no form stands between, or is left over.
        ((L, P, nn.Tanh, L, P, P, L), (0, 0, 0, 0, 1, 1, 1), [(1, 5), (4, 1)]),
        # Another class does not run with it; the next ones that meet do.
        ((P, Q, P, P), (0, 0, 1, 1), [(0, 3), (3, 0)]),
        # One in a stage and two in the other: one of them is left over.
        ((P, L, Q, P), (0, 1, 1, 1), [(0, 3)]),
        ((P, P, L, L), (0, 0, 1, 1), []),
        ((P, Q), (0, 1), []),
        ((L, L), (0, 1), []),
    ],
)
def test_layers_that_meet_run_together(monkeypatch, classes, cut, met):
    """It is the k-th layer with a form of one stage with the k-th last of the other, of one class, and no others."""

    def make():
        return layers_of(*classes)

    pipe, loss, log = run_alone(monkeypatch, make(), cut)
    assert log == met
    assert_equal_gradients(pipe, loss, make)


def test_accumulated_runs_in_pairs_add_up(monkeypatch):
    """Two runs of one batch, reduced at the second, give the gradients of the batch."""

    def make():
        return layers_of(P, P, P)

    pipe, loss, log = run_alone(monkeypatch, make(), (0, 0, 1), runs=2)
    assert len(log) == 4
    assert_equal_gradients(pipe, loss, make)


def test_frozen_layers_have_nothing_to_send_back(monkeypatch):
    """A layer in whose outputs no gradient ends is run forward alone; the others still run together."""

    def make():
        layers = layers_of(P, P, P, P)
        for layer in layers[:1]:
            layer.requires_grad_(requires_grad=False)
        return layers

    pipe, loss, log = run_alone(monkeypatch, make(), (0, 0, 1, 1))
    assert log == [(0, 3), (1, 2), (2, 1)]
    assert_equal_gradients(pipe, loss, make)


def test_one_layer_can_meet_itself(monkeypatch):
    """A pair of one stage runs the forward of a micro-batch with the backward of another through the same layer."""
    schedule = Schedule.from_text(["0F0 (0F1;0B0)OVERLAP_F_B 0B1"], routes=[[0]])
    monkeypatch.setattr(PairedLinear, "log", [])
    pipe = Pipeline(layers_of(P), schedule, functional.mse_loss)
    loss = pipe.step(*batch())
    assert PairedLinear.log == [(0, 0)]
    assert_equal_gradients(pipe, loss, lambda: layers_of(P))


# What runs


def test_pairs_without_a_form_are_lowered_apart():
    """A pair that is kept sends both results behind it; of another the forward leaves before the backward runs."""
    schedule = Schedule.from_text(
        ["0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"], routes=[[0, 1]]
    )
    kept = runnable(schedule, "end", together=lambda pair: pair.forward.microbatch == 1)
    assert kept.to_text() == [
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 (0F1;0B0)OVERLAP_F_B 0RECV_B2 0SEND_F1 0F2 0SEND_F2 0B1 0B2 0REDUCE_GRAD",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1REDUCE_GRAD",
    ]


def test_pairs_of_an_asynchronous_schedule_run_apart():
    """Forward and backward of a pair may need two versions of the weights, which no layer holds at once."""
    text = "0F0 (0F1;0B0)OVERLAP_F_B 0REDUCE_GRAD 0STEP 0B1 0REDUCE_GRAD 0STEP"
    schedule = Schedule.from_text([text], routes=[[0]])
    apart = "0F0 0F1 0B0 0REDUCE_GRAD 0STEP 0B1 0REDUCE_GRAD 0STEP"
    assert runnable(schedule, "end", together=lambda _: True).to_text() == [apart]


def test_a_pair_that_no_form_could_run_is_refused_though_it_would_run_apart():
    """A backward paired with the forward that it needs is wrong, whatever the layers have."""
    schedule = Schedule.from_text(["(0F0;0B0)OVERLAP_F_B"], routes=[[0]])
    with pytest.raises(ScheduleError, match="0B0: it needs 0F0, which stands at position 0"):
        runnable(schedule, "end", together=lambda _: False)


def measured_in_pairs(group):
    pipe = Pipeline(make_layers("paired"), make_schedule("text-pairs", 2, None), make_loss("paired"), group)
    pipe.step(*microbatches("paired", 0, range(4)))
    timeline = pipe.timeline()
    pipe.close()
    computed, awaited = [], []
    for rank in range(2):
        spans = list(timeline.spans(rank))
        computed.append(" ".join(str(span.action) for span in spans if span.lane is Lane.COMPUTE))
        there = {str(span.action): span.end for span in spans if span.lane is Lane.RECEIVE}
        for span in (span for span in spans if isinstance(span.action, Overlap)):
            forward, backward = span.action
            both = f"{forward.stage}RECV_F{forward.microbatch}", f"{backward.stage}RECV_B{backward.microbatch}"
            awaited += [there[message] <= span.start for message in both if message in there]
    return computed, awaited, timeline.peak_activations


def test_a_pair_is_one_span_in_the_timeline(ranks):
    """Each pair has one span of computation, once its messages are there; activations count once."""
    (first, second), awaited, held = ranks.run(2, measured_in_pairs)[0]
    assert held == (3.0, 2.0)
    assert first == "0F0 0F1 (0F2;0B0)OVERLAP_F_B (0F3;0B1)OVERLAP_F_B 0B2 0B3"
    assert second == "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3"
    assert awaited == [True] * 5


# What goes wrong


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("raises", RunError, "forward of layer 0 and backward of layer 3, failed with ValueError: no such stream"),
        ("forgets", RunError, r"layer 0 and backward of layer 3, sent back the gradients of 0 of 1 outputs, 1 too few"),
        ("gives nothing", UsageError, "layer 0 returned NoneType; needed: a tensor or a tuple of tensors"),
    ],
)
def test_a_form_that_fails_is_named(monkeypatch, wrong, error, message):
    """The message names the pair, the class and both layers, and what is missing."""
    pair = "" if error is UsageError else r"\(0F1;1B0\)OVERLAP_F_B: PairedLinear.overlapped_forward_backward, .*"
    with pytest.raises(error, match=pair + message):
        run_alone(monkeypatch, layers_of(P, P, P, P), (0, 0, 1, 1), wrong=wrong)
