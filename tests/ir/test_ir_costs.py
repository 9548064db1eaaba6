"""Costs: units over placements, the split of the backward, messages, refusals, and costs files."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from chimera.errors import FormatError, UsageError
from chimera.ir.action import Kind
from chimera.ir.costs import MODEL_UNIT, SECOND, Costs, PairTime, StageCosts
from chimera.ir.costs_file import read_costs, write_costs
from chimera.ir.schedule import Schedule
from chimera.simulate import simulate

LOOPED = Schedule.from_text(["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"], routes=[[0, 1, 0, 1]])
FULL = StageCosts(
    forward_s=[1.0, 2.0],
    backward_s=[2.5, 4.0],
    input_grad_s=[1.0, 1.5],
    weight_grad_s=[1.5, 2.5],
    activation_bytes=[10.0, 20.0],
    weight_bytes=[5.0, 6.0],
    gradient_bytes=[7.0, 8.0],
    message_bytes=[64.0],
    latency_s=1e-5,
    bandwidth_bytes_per_s=32.0,
    reduce_s=[0.25, 0.5],
    held_for_weight_grad=[0.5, 1.0],
    overlap_s=(PairTime(0, 1, Kind.B, 4.5),),
)


def test_a_stage_costs_its_share_of_the_model():
    """Four stages on two ranks: each is half a unit of time, activations and reduction; a hop is a hop."""
    resolved = Costs(forward=1, backward=3, p2p=0.25, reduce=4).resolve(LOOPED)
    assert resolved.unit == MODEL_UNIT
    times = {kind.name: resolved.duration[kind].tolist() for kind in Kind}
    assert times == {
        "F": [0.5] * 4,
        "B": [1.5] * 4,
        "I": [0.75] * 4,
        "W": [0.75] * 4,
        "SEND_F": [0.25, 0.25, 0.25, 0.0],
        "RECV_F": [0.0, 0.25, 0.25, 0.25],
        "SEND_B": [0.0, 0.25, 0.25, 0.25],
        "RECV_B": [0.25, 0.25, 0.25, 0.0],
        "REDUCE_GRAD": [2.0] * 4,
        "STEP": [0.0] * 4,
    }
    assert resolved.activations.tolist() == [0.5] * 4


def test_a_pair_costs_its_share_where_it_has_a_time():
    """Each F with a B takes ``overlap`` times the stage's share of the model; an F with an I, and no time, the sum."""
    schedule = Schedule.from_text(
        ["0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0I0)OVERLAP_F_B 0W0 1B1 0B1"], routes=[[0, 0]], name="pairs"
    )
    assert Costs(forward=1, backward=2, overlap=2.5).resolve(schedule).pair == {(0, 1, Kind.B): 1.25}
    assert Costs(forward=1, backward=2).resolve(schedule).pair == {}
    assert simulate(schedule, Costs(forward=1, backward=2, overlap=2.5)).makespan == 0.5 * (2 + 2.5 + 2 + 1 + 4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1.0, 1.0)),
        ({"input_grad": 0.5}, (0.5, 1.5)),
        ({"weight_grad": 0.75}, (1.25, 0.75)),
        ({"input_grad": 2.0, "weight_grad": 3.0}, (2.0, 3.0)),
    ],
)
def test_the_backward_splits_in_half_unless_told(given, expected):
    """One part given leaves the rest of B to the other; both given stand as they are."""
    assert Costs(backward=2.0, **given).split_backward() == expected
    per_stage = {f"{name}_s": [value] for name, value in given.items()}
    parts = StageCosts(forward_s=[1.0], backward_s=[2.0], **per_stage).split_backward()
    assert tuple(float(part[0]) for part in parts) == expected


def test_stage_costs_resolve_to_seconds_and_bytes():
    """Every field lands in its place, scaled by the share of a micro-batch where it depends on one."""
    schedule = replace(Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]]), microbatch_share=0.5)
    resolved = FULL.resolve(schedule)
    assert resolved.unit == SECOND
    assert resolved.duration[Kind.F].tolist() == [0.5, 1.0]
    assert resolved.duration[Kind.W].tolist() == [0.75, 1.25]
    assert resolved.duration[Kind.SEND_F].tolist() == [1e-5 + 32 / 32, 0.0]
    assert resolved.duration[Kind.SEND_B].tolist() == [0.0, 1e-5 + 32 / 32]
    assert resolved.duration[Kind.REDUCE_GRAD].tolist() == [0.25, 0.5]
    assert resolved.pair == {(0, 1, Kind.B): 2.25}
    assert resolved.activations.tolist() == [0.5, 0.5]
    assert np.array_equal(resolved.activation_bytes, [5.0, 10.0])
    assert np.array_equal(resolved.resident_bytes, [12.0, 14.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1.0}, "--forward -1.0: needed: a finite number that is not negative"),
        ({"backward": math.nan}, "--backward nan: needed"),
        ({"p2p": math.inf}, "--p2p inf: needed"),
        ({"overlap": -0.5}, "--overlap -0.5: needed"),
        ({"reduce": -0.5}, "--reduce-time -0.5: needed"),
        ({"bandwidth": 0.0}, "--bandwidth 0.0: needed: more than 0"),
        ({"forward": 10**400}, "--forward 1000"),
        ({"forward": "1"}, "--forward '1': needed: a number"),
        ({"weight_grad": 2.5}, "--weight-grad 2.5 is more than --backward 2.0"),
    ],
)
def test_a_wrong_uniform_cost_names_its_option(options, message):
    """Negative, infinite and missing times are refused where they are given."""
    with pytest.raises(UsageError) as error:
        Costs(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward_s": []}, "forward_s has no stage"),
        ({"backward_s": [1.0]}, "--costs: backward_s has 1 numbers; needed: 2, one per stage"),
        ({"forward_s": [1.0, -2.0]}, "--costs: forward_s[1] -2.0: needed"),
        ({"reduce_s": [math.nan, 0.0]}, "--costs: reduce_s[0] nan: needed"),
        ({"message_bytes": [1.0, 1.0]}, "message_bytes has 2 numbers; needed: 1, one per boundary"),
        ({"bandwidth_bytes_per_s": None}, "message_bytes is given without bandwidth_bytes_per_s"),
        ({"message_s": [0.1, 0.2]}, "message_s has 2 numbers; needed: 1, one per boundary"),
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s is 0"),
        ({"weight_grad_s": None, "input_grad_s": [1.0, 5.0]}, "input_grad_s[1] is 5.0, more than backward_s[1] = 4.0"),
        ({"overlap_s": [PairTime(0, 2, Kind.B, 1.0)]}, "pairs stages 0 and 2; needed: stages in 0…1"),
        ({"overlap_s": [PairTime(0, 1, Kind.W, 1.0)]}, "pairs a forward with W; needed: B or I"),
    ],
)
def test_a_wrong_stage_cost_names_its_place(fields, message):
    """A stage too few, a negative time and a size without a speed are told by field and stage."""
    with pytest.raises(UsageError) as error:
        replace(FULL, **fields)
    assert message in str(error.value)


def test_costs_files_read_back_what_was_written(tmp_path):
    """Every field survives; what is at its default is not written."""
    path = tmp_path / "new" / "costs.json"
    write_costs(FULL, path)
    again = read_costs(path)
    assert [getattr(again, name) for name in StageCosts.__dataclass_fields__][:-1] == [
        getattr(FULL, name) for name in StageCosts.__dataclass_fields__
    ][:-1]
    assert tuple(again.overlap_s) == FULL.overlap_s
    write_costs(StageCosts(forward_s=[1], backward_s=[2]), path)
    assert json.loads(path.read_text()) == {
        "format": "chimera-costs",
        "version": 1,
        "forward_s": [1.0],
        "backward_s": [2.0],
        "latency_s": 0.0,
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a chimera-costs file"),
        ("[1]", "got a JSON list"),
        ('{"format": "chimera-schedule", "version": 1}', "got \"format\": 'chimera-schedule'"),
        (
            '{"format": "chimera-costs", "version": 2}',
            'got "version": 2 of chimera-costs; this program reads version 1',
        ),
        ('{"format": "chimera-costs", "version": 1, "forward_s": [1]}', "missing backward_s"),
        ('{"format": "chimera-costs", "version": 1, "forward_s": [1], "forward_s": [1]}', "'forward_s' is given twice"),
        (
            '{"format": "chimera-costs", "version": 1, "forward_s": [1], "backwards_s": [1]}',
            "unknown key 'backwards_s' (did you mean 'backward_s'",
        ),
        (
            '{"format": "chimera-costs", "version": 1, "forward_s": [NaN], "backward_s": [1]}',
            "NaN is not a JSON number",
        ),
        ('{"format": "chimera-costs", "version": 1, "forward_s": 1, "backward_s": [1]}', "needed: a list of numbers"),
        (
            '{"format": "chimera-costs", "version": 1, "forward_s": ["1"], "backward_s": [1]}',
            "forward_s[0] '1': needed",
        ),
        ('{"format": "chimera-costs", "version": 1, "forward_s": [true], "backward_s": [1]}', "forward_s[0] True"),
        ('{"format": "chimera-costs", "version": 1, "forward_s": [1], "backward_s": [-1]}', "backward_s[0] -1: needed"),
        (
            '{"format": "chimera-costs", "version": 1, "forward_s": [1], "backward_s": [1], "overlap_s": [{}]}',
            "overlap_s[0]: missing backward, forward, kind, seconds",
        ),
        (
            (
                '{"format": "chimera-costs", "version": 1, "forward_s": [1], "backward_s": [1], '
                '"overlap_s": [{"forward": 0, "backward": 0, "kind": ["B"], "seconds": 1}]}'
            ),
            "overlap_s[0]: kind is ['B']; needed",
        ),
    ],
)
def test_a_broken_costs_file_is_refused_by_place(tmp_path, text, message):
    """The message gives the file and what in it is wrong."""
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(FormatError) as error:
        read_costs(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_missing_costs_file_is_refused_by_name(tmp_path):
    """No traceback of the operating system reaches the user."""
    with pytest.raises(FormatError, match=r"none\.json: cannot be read as a chimera-costs file"):
        read_costs(tmp_path / "none.json")


def test_a_measured_message_stands_in_for_latency_and_bandwidth():
    """Links of several kinds have a time at each boundary; half a micro-batch takes half of it."""
    costs = StageCosts(forward_s=[1, 1, 1], backward_s=[2, 2, 2], message_s=[0.1, 0.4], latency_s=7.0)
    schedule = Schedule.from_text(["0F0 0B0", "1F0 1B0", "2F0 2B0"], routes=[[0, 1, 2]])
    assert costs.resolve(schedule).duration[Kind.SEND_F].tolist() == [0.1, 0.4, 0.0]
    assert costs.resolve(schedule).duration[Kind.SEND_B].tolist() == [0.0, 0.1, 0.4]
    halves = replace(schedule, microbatch_share=0.5)
    assert costs.resolve(halves).duration[Kind.RECV_F].tolist() == [0.0, 0.05, 0.2]
