"""Whatever sizes, costs, memory limit and cut are drawn: a schedule is refused by name, or trains like one process."""

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from runtime_cases import (
    BUCKET_BYTES,
    NUM_LAYERS,
    SEED,
    make_layers,
    make_loss,
    microbatches,
    reduced_gradients,
    relative_error,
)
from runtime_oracle import serial_history

from chimera.errors import InfeasibleError, UsageError
from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.passes.reductions import REDUCTION_MODES
from chimera.runtime.pipeline import Pipeline
from chimera.schedules import SCHEDULES, build_schedule
from chimera.schedules.search.placements import PLACEMENTS, dealt, place
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.searching import search

TOLERANCE = 1e-9
MODELS = ("mlp", "tuple", "paired", "bert")
"""``paired`` runs overlapped pairs by its layers' own form."""

OPTIONS = {
    "chunks": st.integers(1, 3),
    "pairs": st.integers(1, 2),
    "unit": st.sampled_from(["concatenate", "double", "halve"]),
    "waves": st.integers(1, 2),
}
SYNCHRONOUS = [name for name, family in SCHEDULES.items() if not family.summary.startswith("asynchronous")]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# What is drawn


@st.composite
def published(draw):
    """Draw a schedule by name; None where its sizes are refused."""
    name = draw(st.sampled_from(SYNCHRONOUS))
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    options = {option: draw(OPTIONS[option]) for option in SCHEDULES[name].options}
    try:
        return build_schedule(name, ranks=ranks, microbatches=microbatches, **options)
    except UsageError as error:
        refusal = str(error)
    assert refusal.startswith(f"{name}: got --")
    assert "; needed: " in refusal
    assert "; try --" in refusal
    return None


@st.composite
def searched(draw):
    """Draw the answer of the list scheduler to uneven costs and a memory limit; None where no order is within it."""
    name = draw(st.sampled_from(PLACEMENTS))
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if name == "bidirectional":
        ranks += ranks % 2
    placement = place(name, ranks, **({"chunks": chunks} if name in {"looped", "vee"} else {}))
    times = st.lists(st.integers(0, 9), min_size=placement.num_stages, max_size=placement.num_stages)
    inward, weight = draw(times), draw(times)
    costs = StageCosts(
        forward_s=draw(times),
        backward_s=[max(0, i + w - draw(st.integers(0, 2))) for i, w in zip(inward, weight, strict=True)],
        input_grad_s=inward,
        weight_grad_s=weight,
        latency_s=draw(st.sampled_from([0, 1])),
    )
    limit = draw(st.none() | st.floats(0.5, ranks + 1.0))
    routes = dealt(draw(st.integers(1, 9)), len(placement.routes))
    try:
        return search(Problem(placement, routes, costs, limit), effort=0, compiled=False).schedule
    except InfeasibleError as error:
        refusal = str(error)
    assert "no order holds less than" in refusal
    assert refusal.startswith("--memory-limit ")
    return None


@st.composite
def cases(draw, schedules):
    """Draw a schedule and how it is run, as plain values; None where it is refused or has too many stages."""
    schedule = draw(schedules)
    if schedule is None or schedule.num_stages > NUM_LAYERS:
        event("not run")
        return None
    stages = schedule.num_stages
    # Where each stage but the first begins.
    begins = sorted(draw(st.sets(st.integers(1, NUM_LAYERS - 1), min_size=stages - 1, max_size=stages - 1)))
    event(schedule.name)
    return {
        "text": schedule.to_text(),
        "routes": schedule.placement.routes,
        "microbatch_to_route": schedule.microbatch_to_route,
        "cut": [sum(layer >= begin for begin in begins) for layer in range(NUM_LAYERS)],
        "model": draw(st.sampled_from(MODELS)),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "shard": draw(st.booleans()),
        "reduce": draw(st.sampled_from(REDUCTION_MODES)),
    }


# What is run


def first_step(group, case):
    """Run one step on this rank; return its loss, norm and gradients."""
    schedule = Schedule.from_text(
        case["text"], routes=case["routes"], microbatch_to_route=case["microbatch_to_route"], name="drawn"
    )
    pipe = Pipeline(
        make_layers(case["model"]),
        schedule,
        make_loss(case["model"]),
        group,
        layer_to_stage=case["cut"],
        recompute=case["recompute"],
        reduce=case["reduce"],
        shard_optimizer=case["shard"],
        bucket_bytes=BUCKET_BYTES,
        seed=SEED,
        timeout_s=30.0,
    )
    loss = pipe.step(*microbatches(case["model"], 0, range(schedule.num_microbatches))).item()
    norm = pipe.gradient_norm()
    gradients = reduced_gradients(pipe, shard=case["shard"])
    pipe.close()
    return loss, norm, gradients


def assert_equals_one_process(ranks, case):
    if case is None:
        return
    results = ranks.run(len(case["text"]), first_step, case)
    (serial,) = serial_history(case["model"], len(case["microbatch_to_route"]), 1)
    assert set().union(*(gradients for _, _, gradients in results)) == set(serial["gradients"])
    for loss, norm, gradients in results:
        assert relative_error(loss, serial["loss"]) < TOLERANCE
        assert relative_error(norm, serial["norm"]) < TOLERANCE
        for name, gradient in gradients.items():
            assert relative_error(gradient, serial["gradients"][name], 1e-3 * serial["norm"]) < TOLERANCE, name


FEW = settings(max_examples=30, deadline=None, derandomize=True)
MANY = settings(max_examples=500, deadline=None)


@FEW
@given(case=cases(published()))
def test_published_schedules_train_like_one_process(ranks, case):
    """Loss, norm and gradients of a step equal the serial ones, for some sizes, cuts and ways to run."""
    assert_equals_one_process(ranks, case)


@FEW
@given(case=cases(searched()))
def test_schedules_found_for_uneven_costs_train_like_one_process(ranks, case):
    """The same for what the list scheduler finds for drawn costs under a drawn memory limit."""
    assert_equals_one_process(ranks, case)


@pytest.mark.long
@MANY
@given(case=cases(published()))
def test_many_published_schedules_train_like_one_process(ranks, case):
    """The same for many sizes, others each time."""
    assert_equals_one_process(ranks, case)


@pytest.mark.long
@MANY
@given(case=cases(searched()))
def test_many_schedules_found_for_uneven_costs_train_like_one_process(ranks, case):
    """The same for many costs and limits, others each time."""
    assert_equals_one_process(ranks, case)
