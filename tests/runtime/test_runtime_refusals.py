"""What ``Pipeline`` refuses, and that its messages say what to do."""

import re

import pytest
import torch
from runtime_cases import make_layers, make_loss, make_schedule, microbatches
from torch import nn
from torch.nn import functional

from chimera.errors import ChimeraError, ScheduleError, UsageError
from chimera.ir.text_form import from_text
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import build_schedule


def layers_of(number):
    return [nn.Linear(2, 2) for _ in range(number)]


def alone(**options):
    """Make a pipeline of two stages in this process."""
    schedule = build_schedule("interleaved", ranks=1, microbatches=2, chunks=2)
    return Pipeline(layers_of(3), schedule, functional.mse_loss, **options)


def batch(samples=4, width=2):
    return torch.zeros(samples, width), torch.zeros(samples, width)


# Schedules


def test_a_schedule_that_gets_stuck_is_refused_before_it_runs():
    """A hand-written deadlock is reported action by action."""
    schedule = from_text("routes: 0 1\n0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match=r"(?s)0B0.*1B0.*1F1.*0F1"):
        Pipeline(layers_of(2), schedule, functional.mse_loss)


def test_swapped_messages_are_refused_before_they_run():
    """Receives in another order than the sends would swap two messages of one shape."""
    schedule = from_text(
        "routes: 0 1\n"
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD\n"
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
    )
    with pytest.raises(ScheduleError, match="RECV_F1"):
        Pipeline(layers_of(2), schedule, functional.mse_loss)


def test_a_schedule_without_a_backward_is_refused():
    """Training needs a backward for every forward."""
    with pytest.raises(ScheduleError, match="1F1"):
        Pipeline(layers_of(2), from_text("routes: 0 1\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1"), functional.mse_loss)


def test_an_unknown_place_for_reductions_names_the_known_ones():
    """A misspelt ``reduce`` is answered with what is meant."""
    with pytest.raises(UsageError, match=r"'eager_opt'.*'eager-opt'"):
        alone(reduce="eager_opt")


# Layers and world sizes


def test_more_stages_than_layers_are_refused():
    """Each stage needs a layer; the message gives both numbers."""
    with pytest.raises(UsageError, match=r"got 4 stages for 3 layers.*at most 3 stages"):
        Pipeline(layers_of(3), build_schedule("interleaved", ranks=1, microbatches=1, chunks=4), functional.mse_loss)


@pytest.mark.parametrize("layer_to_stage", [[0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 2], [0, 0, 1, 1]])
def test_a_wrong_layer_to_stage_is_refused(layer_to_stage):
    """One stage per layer, ascending, none left out."""
    text = re.escape(f"layer_to_stage is {layer_to_stage}; needed: for 3 layers, stages 0…1")
    with pytest.raises(UsageError, match=text):
        alone(layer_to_stage=layer_to_stage)


def test_an_empty_layer_to_stage_is_no_default():
    """An empty list is a mistake, not a wish for the default."""
    with pytest.raises(UsageError, match=r"layer_to_stage is \[\]"):
        alone(layer_to_stage=[])


def message_of(group, p):
    schedule = build_schedule("1f1b", ranks=p, microbatches=2)
    try:
        Pipeline(layers_of(4), schedule, functional.mse_loss, group)
    except UsageError as error:
        return str(error)
    return "accepted"


def test_a_world_that_p_does_not_divide_is_refused_on_every_rank(ranks):
    """The message names the factors and the nearest legal sizes."""
    messages = ranks.run(3, message_of, 2)
    assert len(set(messages)) == 1
    assert "world size 3 is not a multiple of t · p = 1 · 2 = 2; start 2 or 4 processes" in messages[0]
    assert "(tensor, data, pipeline) to one of (1, 1, 3), (1, 3, 1)" in messages[0]


def test_a_process_on_its_own_needs_a_schedule_of_one_rank():
    """Without a group the world has one rank; the message says how many processes to start."""
    with pytest.raises(UsageError, match=r"world size 1 .*p = 1 · 4 = 4; start 4 processes"):
        Pipeline(layers_of(4), build_schedule("1f1b", ranks=4, microbatches=2), functional.mse_loss)


@pytest.mark.parametrize("layer", [nn.Flatten, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
def test_weights_on_the_meta_device_need_a_way_to_be_drawn(layer):
    """A layer on the meta device without ``reset_parameters`` is named; one without weights needs none."""
    with torch.device("meta"):
        layers = [nn.Linear(2, 2), layer()]
    schedule = build_schedule("gpipe", ranks=1, microbatches=1)
    if isinstance(layers[1], nn.Flatten):
        Pipeline(layers, schedule, functional.mse_loss).step(*batch())
        return
    with pytest.raises(UsageError, match=r"layer 1 \(Sequential\) has weights on the meta device.*reset_parameters"):
        Pipeline(layers, schedule, functional.mse_loss)


# Batches


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (*batch(1), "got 1 samples for 2 micro-batches"),
        ([torch.zeros(1, 2)] * 3, [torch.zeros(1, 2)] * 3, "got a list of 3 micro-batches; the schedule runs 2"),
        (torch.zeros(4, 2), torch.zeros(3, 2), "inputs have 4 samples along dim 0, targets 3"),
        (torch.zeros(4, 2), [torch.zeros(2, 2)], "targets: got a list of 1 micro-batches"),
        ({"x": torch.zeros(4, 2), "y": torch.zeros(3, 2)}, torch.zeros(4, 2), "field 'y' has 3 samples"),
        ({"x": torch.zeros(4, 2)}, torch.zeros(4, 2), "layer 0 names none in its attribute `fields`"),
        (torch.tensor(1.0), torch.tensor(1.0), "needed: a tensor"),
        ([1.0, 2.0], [torch.zeros(2, 2)] * 2, "a micro-batch is of type float"),
        ("ab", torch.zeros(4, 2), "a micro-batch is of type str"),
        (None, None, "got NoneType where samples are counted"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(inputs, targets, message):
    """What was got and what is needed stand in the message."""
    with pytest.raises(UsageError, match=re.escape(message)):
        alone().step(inputs, targets)


def test_an_evaluation_of_nothing_is_refused():
    """An empty list of micro-batches has no loss."""
    with pytest.raises(UsageError, match="got 0 micro-batches; needed: at least 1"):
        alone().evaluate([], [])


def test_fields_that_a_layer_takes_have_to_be_there():
    """A missing field is named with the layer that takes it."""
    bert = Pipeline(make_layers("bert"), build_schedule("gpipe", ranks=1, microbatches=1), make_loss("bert"))
    inputs, targets = microbatches("bert", 0, [0])
    del inputs[0]["attention_mask"]
    with pytest.raises(UsageError, match="layer 1 takes the fields attention_mask"):
        bert.step(inputs, targets)


def test_micro_batch_numbers_come_one_for_each():
    """Too few numbers for the dropout keys are refused."""
    with pytest.raises(UsageError, match="microbatch_indices has 1 numbers; needed: one for each of 2"):
        alone().step(*batch(), microbatch_indices=[5])


# Losses and layers


class Lists(nn.Module):
    def forward(self, hidden):
        return [hidden]


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda output, _: output, "loss_fn returned a tensor of shape (2, 2); needed: a mean"),
        (lambda *_: 1.0, "loss_fn returned float; needed: a mean"),
        (lambda output, _: {"a": output.sum()}, "needed: a mean"),
        (lambda output, _: (output.sum(), 1), "loss_fn returned tuple"),
    ],
)
def test_losses_of_another_form_are_refused(loss_fn, message):
    """A loss is a mean, or terms as sums with their counts."""
    pipe = Pipeline(layers_of(2), build_schedule("gpipe", ranks=1, microbatches=2), loss_fn)
    with pytest.raises(UsageError, match=re.escape(message)):
        pipe.step(*batch())


def test_layers_give_tensors():
    """A layer that returns a list is named by its number."""
    pipe = Pipeline([nn.Linear(2, 2), Lists()], build_schedule("gpipe", ranks=1, microbatches=1), functional.mse_loss)
    with pytest.raises(UsageError, match="layer 1 returned list; needed: a tensor or a tuple of tensors"):
        pipe.step(*batch())


def refusal_of_counts(group, counts, runs):
    """Accumulate micro-batches whose terms grow unevenly; return what every rank is told."""
    pipe = Pipeline(make_layers("bert"), make_schedule("1f1b", 2, 2), make_loss("bert"), group, timeout_s=5.0)
    try:
        for run in range(runs):
            pipe.step(*microbatches("bert", run, range(2)), last=False, counts=counts)
    except ChimeraError as error:
        return type(error).__name__, str(error)
    finally:
        pipe.close()
    return "accepted", ""


def test_terms_that_grow_unevenly_need_counts(ranks):
    """Without counts= the second run of an accumulation is refused, on all ranks alike, saying what to pass."""
    told = ranks.run(4, refusal_of_counts, None, 2)
    assert told == [told[0]] * 4
    assert told[0][0] == "UsageError"
    assert "grew unevenly" in told[0][1]
    assert "pass counts= of the whole step to every run" in told[0][1]


def test_counts_have_to_name_the_terms(ranks):
    """A misnamed or missing term is refused on all ranks alike."""
    told = ranks.run(2, refusal_of_counts, {"mlm": 10.0}, 1)
    assert told == [("UsageError", "counts= names mlm; needed: exactly the loss terms mlm, nsp")] * 2
