"""The JSON form: what is written, what comes back, and what a hostile file gets."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.errors import FormatError
from chimera.ir.json_form import from_json, to_json
from chimera.ir.schedule import Schedule

ROWS = ["0F0 1F1 (0F2;1B1)OVERLAP_F_B 0B0 0B2 1REDUCE_GRAD", "0F1 1F0 1F2 1I0 0B1 1B2 1W0 0STEP"]


def two_routes():
    """Return a schedule with every feature that the form carries."""
    return Schedule.from_text(ROWS, routes=[[0, 1], [1, 0]], microbatch_to_route=[0, 1, 0], name="two “routes”")


def as_data():
    """Return the small schedule as parsed JSON, to be damaged."""
    return json.loads(to_json(Schedule.from_text(["0F0 0B0 0REDUCE_GRAD", "1F0 1B0"], routes=[[0, 1]])))


def test_the_form_is_the_documented_one():
    """Keys, nulls, pairs and pipelines are those of the interchange format."""
    assert json.loads(to_json(two_routes())) == {
        "format": "chimera-schedule",
        "version": 1,
        "name": "two “routes”",
        "num_stages": 2,
        "num_ranks": 2,
        "num_microbatches": 3,
        "pipelines": [{"stage_to_rank": [0, 1]}, {"stage_to_rank": [1, 0]}],
        "microbatch_to_pipeline": [0, 1, 0],
        "programs": [
            [
                {"kind": "F", "stage": 0, "microbatch": 0, "pipeline": 0},
                {"kind": "F", "stage": 1, "microbatch": 1, "pipeline": 1},
                {
                    "kind": "OVERLAP_F_B",
                    "actions": [
                        {"kind": "F", "stage": 0, "microbatch": 2, "pipeline": 0},
                        {"kind": "B", "stage": 1, "microbatch": 1, "pipeline": 1},
                    ],
                },
                {"kind": "B", "stage": 0, "microbatch": 0, "pipeline": 0},
                {"kind": "B", "stage": 0, "microbatch": 2, "pipeline": 0},
                {"kind": "REDUCE_GRAD", "stage": 1, "microbatch": None, "pipeline": 1},
            ],
            [
                {"kind": "F", "stage": 0, "microbatch": 1, "pipeline": 1},
                {"kind": "F", "stage": 1, "microbatch": 0, "pipeline": 0},
                {"kind": "F", "stage": 1, "microbatch": 2, "pipeline": 0},
                {"kind": "I", "stage": 1, "microbatch": 0, "pipeline": 0},
                {"kind": "B", "stage": 0, "microbatch": 1, "pipeline": 1},
                {"kind": "B", "stage": 1, "microbatch": 2, "pipeline": 0},
                {"kind": "W", "stage": 1, "microbatch": 0, "pipeline": 0},
                {"kind": "STEP", "stage": 0, "microbatch": None, "pipeline": 1},
            ],
        ],
    }


def test_what_is_written_is_read_back():
    """Name, routes, pairs, whole-stage actions and the share survive."""
    schedule = two_routes()
    assert from_json(to_json(schedule)) == schedule
    half = Schedule("half", schedule.placement, schedule.microbatch_to_route, schedule.actions, 0.5)
    assert from_json(to_json(half)) == half
    assert "microbatch_share" not in to_json(schedule)


@pytest.mark.parametrize("pipeline", [{}, {"pipeline": None}, {"pipeline": 0}])
def test_a_whole_stage_action_may_name_a_pipeline_that_fits(pipeline):
    """REDUCE_GRAD carries no information in its pipeline, so null, none and a fitting one are the same."""
    data = as_data()
    data["programs"][0][2] = {"kind": "REDUCE_GRAD", "stage": 0, "microbatch": None, **pipeline}
    assert from_json(json.dumps(data)).to_text() == ["0F0 0B0 0REDUCE_GRAD", "1F0 1B0"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "other", 'got "format": \'other\'; needed: "chimera-schedule"'),
        (["version"], 2, 'got "version": 2 of chimera-schedule; this program reads version 1'),
        (["version"], True, 'got "version": True'),
        (["extra"], 1, "the schedule: unknown key 'extra'"),
        (["num_stage"], 2, "unknown key 'num_stage' (did you mean 'num_stages' or 'num_ranks'?)"),
        (["name"], "\x1b[31m", '"name" is'),
        (["name"], 3, '"name" is 3; needed: 1 to 200 printable characters'),
        (["num_stages"], 3, '"stage_to_rank of pipeline 0" has 2 entries, but "num_stages" is 3; they must agree'),
        (["num_stages"], 2.0, '"num_stages" is 2.0; needed: an integer of at least 1'),
        (["num_ranks"], True, '"num_ranks" is True; needed: an integer of at least 1'),
        (["num_ranks"], 1, "pipeline 0: the rank of stage 1 is 1; needed: an integer in 0…0"),
        (["num_ranks"], 3, '"programs" has 2 entries, but "num_ranks" is 3; they must agree'),
        (["num_microbatches"], 10**18, '"microbatch_to_pipeline" has 1 entries'),
        (["num_microbatches"], 0, '"num_microbatches" is 0; needed: an integer of at least 1'),
        (["pipelines"], [], '"pipelines" is []; needed: a list of at least one pipeline'),
        (["pipelines", 0], [0, 1], "pipeline 0 is [0, 1]"),
        (["pipelines", 0, "ranks"], 1, "pipeline 0: unknown key 'ranks'"),
        (["microbatch_to_pipeline", 0], 1, "the pipeline of micro-batch 0 is 1; needed: an integer in 0…0"),
        (["microbatch_share"], 0, '"microbatch_share" is 0; needed: a number above 0, at most 1'),
        (["microbatch_share"], "half", "\"microbatch_share\" is 'half'"),
        (["programs", 1], None, "program 1 is None; needed: a list of actions"),
        (["programs", 1, 0], "1F0", "program 1, action 0 is '1F0'"),
        (["programs", 1, 1, "kind"], "b", "program 1, action 1: kind is 'b'"),
        (["programs", 1, 1, "kind"], ["B"], "program 1, action 1: kind is ['B']"),
        (["programs", 1, 1, "stage"], 2, "program 1, action 1: stage is 2; needed: an integer in 0…1"),
        (["programs", 1, 1, "stage"], None, "program 1, action 1: stage is None"),
        (["programs", 1, 1, "stage"], True, "program 1, action 1: stage is True"),
        (["programs", 1, 1, "microbatch"], -1, "program 1, action 1: microbatch is -1; needed: an integer in 0…0"),
        (["programs", 1, 1, "microbatch"], None, "program 1, action 1: microbatch is None"),
        (["programs", 1, 1, "pipeline"], 1, "program 1, action 1: pipeline is 1; needed: an integer in 0…0"),
        (["programs", 1, 1, "cost"], 1, "program 1, action 1: unknown key 'cost'"),
        (["programs", 0, 2, "microbatch"], 0, "program 0, action 2: microbatch of REDUCE_GRAD is 0; needed: null"),
        (["programs", 0, 2, "stage"], None, "program 0, action 2: stage is None"),
        (["programs", 0, 2, "stage"], 1, "program 0, action 2: pipeline 0 puts stage 1 on rank 1"),
        (["programs", 0, 0], {"kind": "OVERLAP_F_B", "actions": [1, 2]}, "program 0, action 0 pairs 1"),
        (["programs", 0, 0], {"kind": "OVERLAP_F_B", "actions": []}, "has 0 entries"),
        (["programs", 0, 0], {"kind": "OVERLAP_F_B"}, "program 0, action 0: missing actions"),
    ],
)
def test_a_damaged_file_names_the_damage(path, value, message):
    """Each wrong key, type, count and range is named with its place."""
    data = as_data()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(FormatError) as error:
        from_json(json.dumps(data))
    assert message in str(error.value)


def test_an_action_on_another_pipeline_than_its_microbatch_is_refused():
    """The pipeline of an action repeats what microbatch_to_pipeline says, and may not contradict it."""
    text = to_json(two_routes()).replace('"microbatch": 2, "pipeline": 0', '"microbatch": 2, "pipeline": 1', 1)
    with pytest.raises(FormatError, match="program 0, action 2: pipeline is 1, but microbatch_to_pipeline puts"):
        from_json(text)


@pytest.mark.parametrize(("first", "second"), [("F", "F"), ("B", "F"), ("F", "W")])
def test_a_pair_is_a_forward_and_a_backward(first, second):
    """Other kinds do not pair, and neither does a pair."""
    data = as_data()
    parts = [{"kind": kind, "stage": 0, "microbatch": 0, "pipeline": 0} for kind in (first, second)]
    data["programs"][0][0] = {"kind": "OVERLAP_F_B", "actions": parts}
    with pytest.raises(FormatError, match=f"program 0, action 0 pairs 0{first}0 with 0{second}0"):
        from_json(json.dumps(data))
    data["programs"][0][0]["actions"] = [{"kind": "OVERLAP_F_B", "actions": parts}, parts[1]]
    with pytest.raises(FormatError, match="program 0, action 0: kind is 'OVERLAP_F_B'"):
        from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a chimera-schedule file: Expecting value"),
        ("[" * 100_000, "nested far too deeply"),
        ('{"a":' * 100_000, "nested far too deeply"),
        ('{"format": NaN}', "NaN is not a JSON number"),
        ('{"format": 1, "format": 2}', "key 'format' is given twice"),
        ('{"format": ' + "9" * 5000 + "}", "not a chimera-schedule file: Exceeds the limit"),
        ("[]", 'got a JSON list; needed: {"format": "chimera-schedule", …}'),
        ('"chimera-schedule"', "got a JSON str"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, message):
    """Nesting, constants, repeated keys and huge numbers end in one named error."""
    with pytest.raises(FormatError) as error:
        from_json(text)
    assert message in str(error.value)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["F", "OVERLAP_F_B", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "stage"]), inner, max_size=2),
    max_leaves=4,
)


def places(value, path=()):
    """Yield the path of every value inside parsed JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@given(data=st.data())
@settings(deadline=None)
def test_any_replaced_value_is_read_or_refused_by_name(data):
    """Whatever stands anywhere in the file, reading ends in a schedule that round-trips or in a FormatError."""
    tree = json.loads(to_json(two_routes()))
    path = data.draw(st.sampled_from(list(places(tree))))
    place = tree
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = data.draw(JSON_VALUES)
    try:
        schedule = from_json(json.dumps(tree))
    except FormatError:
        return
    assert from_json(to_json(schedule)) == schedule


def test_versions_of_the_weights_are_read_back():
    """They stand in the file where the schedule has them, one for each micro-batch."""
    rows = ["0F0 0B0 0STEP 0F1 0B1 0STEP"]
    schedule = replace(Schedule.from_text(rows, routes=[[0]]), microbatch_to_version=(0, 1))
    data = json.loads(to_json(schedule))
    assert data["microbatch_to_version"] == [0, 1]
    assert from_json(to_json(schedule)) == schedule
    for versions, message in (
        ([0], '"microbatch_to_version" has 1 entries'),
        ([0, -1], "version of micro-batch 1 is -1"),
    ):
        with pytest.raises(FormatError, match=message):
            from_json(json.dumps({**data, "microbatch_to_version": versions}))
