"""Timeline files and traces: they read back, they load in Perfetto, they are whole or absent."""

import json
from itertools import pairwise

import numpy as np
import pytest

from chimera.errors import FormatError
from chimera.ir.action import parse_instruction
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.files import replacing
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, MemoryCurve, Timeline
from chimera.passes.lower import lower
from chimera.schedules import build_schedule
from chimera.simulate import simulate
from chimera.timeline import read_timeline, write_timeline, write_trace

PAIRED = Schedule.from_text(["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]])
STAGES = StageCosts(forward_s=[0.1, 1 / 3], backward_s=[0.2, 0.7], activation_bytes=[10, 20], weight_bytes=[1, 2])


@pytest.mark.parametrize(
    "timeline",
    [
        simulate(PAIRED, STAGES),
        simulate(lower(build_schedule("chimera", ranks=4, microbatches=4), reduce="eager"), Costs(p2p=0.1, reduce=1)),
        Timeline.from_spans(
            [(0, Lane.COMPUTE, parse_instruction("0F0"), 17.25, 17.5)],
            num_ranks=2,
            recorded_memory=[MemoryCurve(np.array([17.25]), np.array([3.0]), "bytes")] * 2,
        ),
    ],
    ids=["bytes and pairs", "lowered", "recorded"],
)
def test_a_timeline_file_reads_back_bit_for_bit(tmp_path, timeline):
    """Spans, order, memory, routes and unit are the same after writing and reading."""
    path = tmp_path / "timeline.json"
    write_timeline(timeline, path)
    again = read_timeline(path)
    for rank in range(timeline.num_ranks):
        assert list(again.spans(rank)) == list(timeline.spans(rank))
        for ours, theirs in zip(again.memory(rank), timeline.memory(rank), strict=True):
            assert np.array_equal(ours, theirs)
    for name in ("name", "unit", "microbatch_to_route", "peak_activations", "peak_bytes", "makespan"):
        assert getattr(again, name) == getattr(timeline, name), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "ms"}, "unit is 'ms'"),
        ({"unit": ["s"]}, "unit is ['s']"),
        ({"ranks": [{"lane": [[]], "action": ["0F0"], "start": [0], "end": [1]}]}, "lane[0] is []"),
        ({"ranks": {}}, "ranks is a dict; needed: a list"),
        ({"ranks": [{"lane": [], "action": [], "start": []}]}, "ranks[0]: missing end"),
        (
            {"ranks": [{"lane": ["compute"], "action": ["0F0"], "start": [0], "end": []}]},
            "columns of different lengths",
        ),
        ({"ranks": [{"lane": ["cpu"], "action": ["0F0"], "start": [0], "end": [1]}]}, "lane[0] is 'cpu'"),
        (
            {"ranks": [{"lane": ["compute"], "action": ["0F"], "start": [0], "end": [1]}]},
            "action[0]: '0F' is not an action",
        ),
        ({"ranks": [{"lane": ["compute"], "action": ["0F0"], "start": [2], "end": [1]}]}, "0F0 ends at 1.0, before"),
        ({"ranks": [{"lane": ["compute"], "action": ["0F0"], "start": ["x"], "end": [1]}]}, "start[0] is 'x'"),
        ({"memory": []}, "memory has 0 curves; needed: 2"),
        ({"microbatch_to_route": [-1]}, "microbatch_to_route holds something other than route numbers"),
        ({"activations": [1]}, "activations has 1 numbers; needed: 2, one per stage"),
        ({"resident_bytes": [1, 2, 3]}, "resident_bytes has 3 numbers; needed: 2, one per rank"),
        ({"activations": [1, 10**400]}, "activations[1] is 1000"),
        ({"extra": 1}, "unknown key 'extra'"),
    ],
)
def test_a_broken_timeline_file_is_refused_by_place(tmp_path, change, message):
    """The message says where in the file the fault is."""
    path = tmp_path / "timeline.json"
    write_timeline(simulate(PAIRED), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError) as error:
        read_timeline(path)
    assert message in str(error.value)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    """The new file appears whole or not at all."""
    path = tmp_path / "figure.txt"
    path.write_text("old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("new")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_half()
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("figure.txt", "old")]


def test_the_trace_of_a_small_program_is_the_expected_one(tmp_path):
    """Process = rank, threads by lane, microseconds from the first span, arguments for the search box."""
    schedule = lower(Schedule.from_text(["0F0 0B0", "1F0 1B0"], routes=[[0, 1]]))
    path = tmp_path / "trace.json"
    write_trace(simulate(schedule, Costs(forward=1, backward=2, p2p=0.5, reduce=1)), path, memory=False)
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, 0, "0F0", 0.0, 1000.0),
        (0, 0, "0B0", 5000.0, 2000.0),
        (0, 1, "0SEND_F0", 1000.0, 500.0),
        (0, 2, "0RECV_B0", 4500.0, 500.0),
        (0, 3, "0REDUCE_GRAD", 7000.0, 1000.0),
        (1, 0, "1F0", 1500.0, 1000.0),
        (1, 0, "1B0", 2500.0, 2000.0),
        (1, 1, "1SEND_B0", 4500.0, 500.0),
        (1, 2, "1RECV_F0", 1000.0, 500.0),
        (1, 3, "1REDUCE_GRAD", 4500.0, 1000.0),
    ]
    assert events[1]["args"] == {"stage": 0, "mb": 0, "direction": "backward", "route": 0}
    assert events[4]["args"] == {"stage": 0}
    names = [e for e in trace["traceEvents"] if e["name"] in {"process_name", "thread_name"} and e["pid"] == 1]
    assert [(e.get("tid"), e["args"]["name"]) for e in names] == [
        (None, "rank 1"),
        (0, "compute"),
        (1, "send"),
        (2, "receive"),
        (3, "collectives"),
    ]
    flows = [(e["id"], e["ph"], e["pid"], e["tid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] in {"s", "f"}]
    assert sorted(flows, key=lambda flow: (flow[0], flow[1] == "f")) == [
        (0, "s", 0, 1, 1000.0),
        (0, "f", 1, 0, 1500.0),
        (1, "s", 1, 1, 4500.0),
        (1, "f", 0, 0, 5000.0),
    ]
    assert trace["otherData"]["unit"] == "model unit; 1 model unit is shown as 1 ms"


def test_spans_that_overlap_go_to_further_threads_and_none_is_lost(tmp_path):
    """Three receives in flight at once take threads 2, 6 and 10; one that starts as another ends shares its thread."""
    receives = [("1RECV_F0", 0.0, 3.0), ("1RECV_F1", 1.0, 4.0), ("1RECV_F2", 2.0, 5.0), ("1RECV_F3", 3.0, 6.0)]
    timeline = Timeline.from_spans(
        [(0, Lane.RECEIVE, parse_instruction(text), 7 + start, 7 + end) for text, start, end in receives], num_ranks=1
    )
    write_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    placed = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert placed == {
        "1RECV_F0": (2, 0.0, 3e6),
        "1RECV_F1": (6, 1e6, 3e6),
        "1RECV_F2": (10, 2e6, 3e6),
        "1RECV_F3": (2, 3e6, 3e6),
    }
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {2: "receive", 6: "receive (2)", 10: "receive (3)"}


def test_events_of_one_thread_never_cross_and_memory_is_a_counter(tmp_path):
    """A whole step of Chimera: per thread each event starts at or after the end of the one before it."""
    schedule = lower(build_schedule("chimera", ranks=8, microbatches=8))
    write_trace(simulate(schedule, Costs(forward=1 / 3, backward=0.7, p2p=2, reduce=0.1)), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert sum(map(len, threads.values())) == len(schedule.table)
    for spans in threads.values():
        assert all(after["ts"] >= before["ts"] + before["dur"] - 1e-3 for before, after in pairwise(spans))
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 3]
    assert max(e["args"]["activations"] for e in counters) == 8
