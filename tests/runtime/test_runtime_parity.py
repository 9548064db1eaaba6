"""Any schedule equals one process: losses, gradients, norm and weights over ten steps, four of the largest cases."""

import numpy as np
import pytest
import runtime_cases
import torch
from runtime_cases import ADAMW, all_names, hashable, make_loss, make_schedule, microbatch, relative_error
from runtime_oracle import serial_history, total_loss
from runtime_pairwise import (
    AXES,
    CUT_AXES,
    STEPS,
    every_cut_case,
    full_product,
    joint_cases,
    name_of,
    num_ranks,
    pairs_of,
    pairwise_cases,
    sized,
    steps_of,
)

TOLERANCE = 1e-9
EIGHT_RANKS = {"schedule": "chimera-1-concatenate", "p": 8, "d": 1, "m": "p", "model": "bert", "reduce": "eager-opt"}
EIGHT_RANKS["shard"] = True
LARGER_CASES = [
    {**EIGHT_RANKS, "recompute": "none"},
    {**EIGHT_RANKS, "schedule": "chimera-2-halve", "recompute": "full", "shard": False},
    {**EIGHT_RANKS, "schedule": "1f1b", "m": "2p+1", "recompute": "none", "shard": False},
]
# DualPipe wants an even number of at least 2p micro-batches, which no other case has.
DUALPIPE_CASES = [
    {**EIGHT_RANKS, "schedule": "dualpipe", "p": p, "m": "2p", "model": model, "recompute": recompute}
    for p, model, recompute in ((2, "mlp", "full"), (4, "bert", "none"))
]

# The ranks of one host share memory, so messages go over gloo only where it is asked for.
GLOO_CASES = [
    {**EIGHT_RANKS, "schedule": name, "p": p, "d": d, "t": t, "m": m, "model": model, "recompute": recompute}
    | {"shard": False, "sequence": False, "backend": "gloo"}
    for name, p, d, t, m, model, recompute in (
        ("chimera-2-double", 4, 1, 1, "2p+1", "bert", "none"),
        ("interleaved", 2, 2, 1, "3", "tuple", "full"),
        ("zb-v", 4, 1, 1, "p", "tuple", "none"),
        ("interleaved", 2, 1, 2, "3", "t5-cut", "full"),
        ("zb-h1", 2, 1, 4, "p", "llama-cut", "none"),
    )
]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def worst(request):
    """Collect errors by quantity; say at the end how many cases there were and what their largest errors were."""
    errors = []
    yield errors
    if errors:
        largest = {quantity: max(error[quantity] for error in errors) for quantity in errors[0]}
        text = ", ".join(f"{quantity} {error:.1e}" for quantity, error in largest.items())
        with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
            print(f"\nparity: {len(errors)} cases; largest relative errors: {text}")


def run(ranks, case, steps):
    """Run a case on ranks and serially; return the errors, after checks that need no tolerance."""
    case = sized(case)
    histories = ranks.run(num_ranks(case), runtime_cases.train, case, steps, timeout_s=120.0)
    num_microbatches = make_schedule(case["schedule"], case["p"], case["m"]).num_microbatches
    serial = serial_history(case["model"], num_microbatches * case["d"], steps)
    for history in histories:
        assert [step["loss"] for step in history] == [step["loss"] for step in histories[0]]
        assert [step["norm"] for step in history] == [step["norm"] for step in histories[0]]
    assert_replicas_equal(histories, case["model"])
    return errors_of(histories, serial)


def assert_replicas_equal(histories, model):
    """Every parameter is somewhere; all copies of it and of its gradient have the same bits after each step."""
    for step in zip(*histories, strict=True):
        for quantity in ("gradients", "weights"):
            copies = {}
            for rank in step:
                for name, array in rank[quantity].items():
                    copies.setdefault(name, set()).add(hashable(array))
            assert copies.keys() == all_names(model)
            assert [name for name, different in copies.items() if len(different) > 1] == []


def errors_of(histories, serial):
    """Return the largest relative error of each quantity over ranks, steps and parameters."""
    errors = dict.fromkeys(("loss", "norm", "gradients", "weights"), 0.0)
    for history in histories:
        for got, expected in zip(history, serial, strict=True):
            for quantity in ("loss", "norm"):
                errors[quantity] = max(errors[quantity], relative_error(got[quantity], expected[quantity]))
            for name, array in got["gradients"].items():
                # By parameter, but none is asked for more than a thousandth of the whole gradient's precision.
                error = relative_error(array, expected["gradients"][name], floor=1e-3 * expected["norm"])
                errors["gradients"] = max(errors["gradients"], error)
            for name, array in got["weights"].items():
                # A parameter without a gradient but for rounding stays at 0 but for rounding (the last bias of ICT's
                # second encoder moves all blocks alike), so none is asked for more than one update's precision.
                error = relative_error(array, expected["weights"][name], floor=ADAMW["lr"])
                errors["weights"] = max(errors["weights"], error)
    return errors


def assert_equal_to_one_process(ranks, case, worst, steps=STEPS):
    errors = run(ranks, case, steps)
    assert max(errors.values()) <= TOLERANCE, errors
    worst.append(errors)


@pytest.mark.parametrize("case", pairwise_cases(), ids=name_of)
def test_every_pair_of_choices_equals_one_process(ranks, worst, case):
    """Up to ten steps equal the serial run, in cases that cover every pair of p, d, t, model and kind of schedule."""
    assert_equal_to_one_process(ranks, case, worst, steps_of(case))


@pytest.mark.parametrize("case", GLOO_CASES, ids=name_of)
def test_messages_over_gloo_equal_one_process(ranks, worst, case):
    """Ten steps equal the serial run where every message goes over the communicator, as between hosts."""
    assert_equal_to_one_process(ranks, case, worst)


def test_eight_ranks_equal_one_process(ranks, worst):
    """Ten steps of Chimera on eight ranks equal the serial run."""
    assert_equal_to_one_process(ranks, LARGER_CASES[0], worst)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *full_product(),
        *every_cut_case(),
        *LARGER_CASES,
        *DUALPIPE_CASES,
        *(case for case in pairwise_cases() if steps_of(case) < STEPS),
    ],
    ids=name_of,
)
def test_every_combination_equals_one_process(ranks, worst, case):
    """Ten steps equal the serial run for every legal combination."""
    assert_equal_to_one_process(ranks, case, worst)


def test_selection_covers_every_legal_pair():
    """No two choices that go together are left untested together, and every choice of either product is there."""
    selected = pairwise_cases()
    assert pairs_of(selected) == pairs_of(joint_cases())
    for axis, values in [*AXES.items(), *CUT_AXES.items()]:
        # BERT as no rank shares it is in other cases of this file.
        assert set(values) - {"bert"} <= {case[axis] for case in selected}


@pytest.mark.parametrize("model", AXES["model"])
def test_a_swap_of_two_micro_batches_would_show(model):
    """Inputs of one micro-batch with the labels or the dropout of another give other gradients."""
    layers, loss_fn = runtime_cases.make_layers(model), make_loss(model)
    weight = next(layers[4].parameters())

    def gradient(pairs, keys):
        weight.grad = None
        total_loss(layers, loss_fn, pairs, keys).backward()
        return weight.grad.numpy().copy()

    # 0 and 2 have equal shapes, and so have their messages.
    (x0, y0), (x2, y2) = (microbatch(model, 0, index) for index in (0, 2))
    keys = [(0, 0), (0, 2)]
    right = gradient([(x0, y0), (x2, y2)], keys)
    if model != "bert":  # its head reads the labels' places, so that labels move only with their inputs
        assert relative_error(gradient([(x2, y0), (x0, y2)], keys), right) > 1e-3
    assert relative_error(gradient([(x2, y2), (x0, y0)], keys), right) > 1e-3
    np.testing.assert_array_equal(gradient([(x0, y0), (x2, y2)], keys), right)


@pytest.mark.parametrize(
    ("schedule", "p", "d", "m"),
    [("1f1b", 4, 2, "2p+1"), ("interleaved", 2, 1, "3"), ("chimera-1-halve", 2, 2, "p"), ("text-forked", 3, 1, "own")],
)
def test_gradients_in_single_precision_equal_one_process(ranks, schedule, p, d, m):
    """The gradient of one fp32 step differs from the serial fp32 gradient by at most 1e-5 of its norm."""
    choices = {"model": "bert", "recompute": "full", "reduce": "eager", "shard": d > 1}
    case = sized({"schedule": schedule, "p": p, "d": d, "m": m, **choices})
    histories = ranks.run(p * d, runtime_cases.train, {**case, "dtype": "float32"}, 1)
    num_microbatches = make_schedule(schedule, p, case["m"]).num_microbatches * d
    (serial,) = serial_history("bert", num_microbatches, 1, torch.float32)
    gathered = {name: array for (step,) in histories for name, array in step["gradients"].items()}
    assert {array.dtype.name for array in gathered.values()} == {"float32"}
    got = np.concatenate([gathered[name].ravel() for name in sorted(gathered)])
    expected = np.concatenate([serial["gradients"][name].ravel() for name in sorted(gathered)])
    assert relative_error(got, expected) <= 1e-5


@pytest.mark.parametrize(
    ("schedule", "d", "t", "model", "steps"),
    [
        ("chimera-1-concatenate", 1, 1, "bert", 20),
        pytest.param("chimera-1-concatenate", 1, 1, "bert", 50, marks=pytest.mark.long),
        pytest.param("zb-h1", 1, 2, "gpt-cut", 50, marks=pytest.mark.long),
        pytest.param("1f1b", 2, 1, "bert", 50, marks=pytest.mark.long),
    ],
)
def test_losses_in_single_precision_stay_with_one_process(ranks, schedule, d, t, model, *, steps):
    """Over many steps the fp32 loss leaves the serial fp32 loss by at most 1e-4, while it falls."""
    choices = {"model": model, "recompute": "none", "reduce": "eager-opt", "shard": d > 1, "t": t, "sequence": t > 1}
    case = sized({"schedule": schedule, "p": 2, "d": d, "m": "2p+1", **choices})
    histories = ranks.run(2 * d * t, runtime_cases.train, {**case, "dtype": "float32"}, steps, timeout_s=120.0)
    num_microbatches = make_schedule(schedule, 2, case["m"]).num_microbatches * d
    serial = [step["loss"] for step in serial_history(model, num_microbatches, steps, torch.float32)]
    for history in histories:
        assert max(relative_error(a["loss"], b) for a, b in zip(history, serial, strict=True)) <= 1e-4
    assert serial[-1] < (1 - 0.001 * steps) * serial[0]
