"""Exports of nsys: which work belongs to which range, whatever the exporter left out or named otherwise."""

import sqlite3

import pytest
from nsys_files import Export

from chimera.errors import FormatError, UsageError
from chimera.ir.timeline import Lane
from chimera.timeline.nsys import Range, read_nsys
from chimera.timeline.nsys_steps import steps_of

MAIN, OTHER = 5 << 24, (5 << 24) + 1
"""Two threads of one process."""


def ranges_of(path, **options):
    return {each.name: each.work for each in read_nsys(path, **options).ranges}


def test_a_range_lasts_from_its_first_kernel_to_its_last_one(tmp_path):
    """Kernels run after the call that launched them, and after the range was left; copies and settings count too."""
    with Export(tmp_path / "a.sqlite") as export:
        export.range("0F0", 100, 200, MAIN)
        export.launch(110, 300, 340, MAIN)
        export.launch(190, 350, 420, MAIN)
        export.launch(150, 280, 290, MAIN, table="MEMSET")
        export.launch(250, 500, 600, MAIN)
    (found,) = read_nsys(tmp_path / "a.sqlite").ranges
    assert found == Range("0F0", MAIN, 100, 200, (280, 420))


def test_registered_names_marks_and_domains(tmp_path):
    """A registered name is looked up; what has no end, a mark or a domain's row, is no range."""
    with Export(tmp_path / "a.sqlite") as export:
        export.range("registered", 100, 200, MAIN, registered=True)
        export.range("mark", 120, None, MAIN, event_type=34)
        export.range("domain", 0, None, MAIN, event_type=75)
        export.range("started elsewhere", 100, 200, MAIN, event_type=60)
        export.launch(110, 300, 340, MAIN)
    assert ranges_of(tmp_path / "a.sqlite") == {"registered": (300, 340)}


def test_overlapping_ranges_of_two_threads_keep_their_own_kernels(tmp_path):
    """A launch counts for the ranges of the thread that made it, unless all threads are asked for."""
    with Export(tmp_path / "a.sqlite") as export:
        export.range("one", 100, 200, MAIN)
        export.range("other", 120, 220, OTHER)
        export.launch(150, 300, 310, MAIN)
        export.launch(151, 400, 410, OTHER)
    assert ranges_of(tmp_path / "a.sqlite") == {"one": (300, 310), "other": (400, 410)}
    assert ranges_of(tmp_path / "a.sqlite", any_thread=True) == {"one": (300, 410), "other": (300, 410)}


def test_processes_of_one_node_number_their_launches_alike(tmp_path):
    """The same correlation in two processes is two launches where kernels say whose they are."""
    first, second = 5 << 24, 6 << 24
    with Export(tmp_path / "a.sqlite", process_of_kernels=True) as export:
        export.range("one", 100, 200, first)
        export.range("other", 100, 200, second)
        export.launch(150, 300, 310, first, correlation=9)
        export.launch(150, 400, 410, second, correlation=9)
    assert ranges_of(tmp_path / "a.sqlite") == {"one": (300, 310), "other": (400, 410)}


@pytest.mark.parametrize("suffix", ["", "_V2", "_V3"])
def test_tables_may_have_a_version_behind_their_name(tmp_path, suffix):
    """Of several versions the newest is read."""
    with Export(tmp_path / "a.sqlite", suffix=suffix, event_type=False) as export:
        export.range("0F0", 100, 200, MAIN)
        export.launch(110, 300, 340, MAIN)
    assert ranges_of(tmp_path / "a.sqlite") == {"0F0": (300, 340)}


def test_a_name_is_compared_whole_and_never_run(tmp_path):
    """Names that hold quotes or begin like another are names."""
    awkward = "0F0'; DROP TABLE NVTX_EVENTS; --"
    with Export(tmp_path / "a.sqlite") as export:
        for name in ("step 0", "step 0 again", "0F0", awkward, "0F01junk"):
            export.range(name, 100, 900, MAIN)
        export.launch(110, 300, 340, MAIN)
    assert set(ranges_of(tmp_path / "a.sqlite")) == {"step 0", "step 0 again", "0F0", awkward, "0F01junk"}
    (timeline,) = steps_of([read_nsys((tmp_path / "a.sqlite").rename(tmp_path / "a_node0.sqlite"))]).timelines
    assert [str(span.action) for span in timeline.spans(0)] == ["0F0"]


def test_reading_leaves_the_file_as_it_is(tmp_path):
    """It may lie in a folder that cannot be written, and its bytes stay the same."""
    path = tmp_path / "with ? and #.sqlite"
    with Export(path) as export:
        export.range("0F0", 100, 200, MAIN)
        export.launch(110, 300, 340, MAIN)
    before = path.read_bytes()
    assert read_nsys(path).device_s == {"kernel": pytest.approx(40e-9)}
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def write_rank(path, rank, *, shift=0, quiet=False):
    """Write one rank's file of two steps of 1F1B over two ranks, the second one twice as long."""
    programs = {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}
    with Export(path) as export:
        export.range(f"rank {rank} of pipeline 0", shift, shift + 9_000, MAIN)
        for step in range(2):
            begin = shift + 1_000 + 4_000 * step
            export.range(f"step {step}", begin, begin + 3_000, MAIN)
            for number, name in enumerate(programs[rank]):
                at = begin + 100 + 400 * number
                export.range(name, at, at + 50, MAIN)
                if not (quiet and name.endswith("F0")):
                    length = 300 * (step + 1)
                    export.launch(at + 10, at + 100 * (1 + rank), at + 100 * (1 + rank) + length, MAIN)


def test_steps_of_all_nodes_become_one_timeline_each(tmp_path):
    """Each file has a clock of its own; a step begins when the first rank of each file begins it."""
    paths = [tmp_path / f"run_node{rank}.sqlite" for rank in range(2)]
    for rank, path in enumerate(paths):
        write_rank(path, rank, shift=1_000_000 * rank)
    found = steps_of([read_nsys(path) for path in paths], name="run")
    first, second = found.timelines
    spans = [
        (s.rank, str(s.action), round(s.start * 1e9), round(s.end * 1e9)) for r in range(2) for s in first.spans(r)
    ]
    assert spans == [(0, "0F0", 200, 500), (0, "0B0", 600, 900), (1, "1F0", 300, 600), (1, "1B0", 700, 1000)]
    assert second.busy.tolist() == pytest.approx([1.2e-6, 1.2e-6])
    assert found.schedule.to_text() == ["0F0 0B0", "1F0 1B0"]
    assert found.schedule.placement.routes == ((0, 1),)


def test_an_action_that_launched_nothing_has_no_span_and_is_counted(tmp_path):
    """It is left out of the timeline, and said."""
    write_rank(tmp_path / "run_node0.sqlite", 0, quiet=True)
    found = steps_of([read_nsys(tmp_path / "run_node0.sqlite")])
    assert [str(span.action) for span in found.timelines[0].spans(0)] == ["0B0"]
    assert found.idle_ranges == 2


def test_a_missing_node_leaves_a_timeline_without_a_schedule(tmp_path):
    """What the other rank did is unknown, so no reason for idle time can be given."""
    write_rank(tmp_path / "run_node1.sqlite", 1)
    found = steps_of([read_nsys(tmp_path / "run_node1.sqlite")])
    assert found.timelines[0].num_ranks == 2
    assert list(found.timelines[0].spans(0)) == []
    assert found.schedule is None


def test_a_file_given_twice_is_refused(tmp_path):
    """The same rank's step would stand there twice."""
    write_rank(tmp_path / "run_node0.sqlite", 0)
    export = read_nsys(tmp_path / "run_node0.sqlite")
    with pytest.raises(UsageError, match="step 0 of rank 0 is there 2 times"):
        steps_of([export, export])


def test_chimeras_published_names_are_read(tmp_path):
    """Micro-batches are numbered by their order each way; what is run again is part of the backward after it."""
    for rank in range(2):
        with Export(tmp_path / f"bert_node{rank}.sqlite") as export:
            export.range("call_pipeline", 0, 9_000, MAIN)
            names = ["call_forward", "call_forward:up_pipe", "recompute:up_pipe", "call_backward:up_pipe"]
            for number, name in enumerate(
                [*names, "recompute", "call_backward", "nb_sync_grad", "sync_grad", "wait_all"]
            ):
                export.range(name, 1_000 * number, 1_000 * number + 500, MAIN)
                export.launch(1_000 * number + 10, 1_000 * number + 100, 1_000 * number + 900, MAIN)
    found = steps_of([read_nsys(tmp_path / f"bert_node{rank}.sqlite") for rank in range(2)])
    (timeline,) = found.timelines
    texts = [[str(span.action) for span in timeline.spans(rank)] for rank in range(2)]
    assert texts == [
        ["0F0", "1F1", "1B1", "0B0", "0REDUCE_GRAD", "1REDUCE_GRAD"],
        ["1F0", "0F1", "0B1", "1B0", "1REDUCE_GRAD", "0REDUCE_GRAD"],
    ]
    backward = next(span for span in timeline.spans(0) if str(span.action) == "1B1")
    assert (round(backward.start * 1e9), round(backward.end * 1e9)) == (2_100, 3_900)
    assert found.schedule.placement.routes == ((0, 1), (1, 0))
    assert {span.lane for span in timeline.spans(0)} == {Lane.COMPUTE, Lane.REDUCE}


# Files that are something else


def test_a_file_that_is_not_there(tmp_path):
    """Nothing is made of a name."""
    with pytest.raises(FormatError, match="there is no such file"):
        read_nsys(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


def test_a_file_that_is_no_database(tmp_path):
    """The raw recording is not the export."""
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"NSYS-REP" + bytes(2_000))
    with pytest.raises(FormatError, match=r"cannot be read as SQLite.*nsys export --type sqlite"):
        read_nsys(path)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("CREATE TABLE other (id)", "no table NVTX_EVENTS: nothing was annotated; record with 'chimera profile"),
        ("CREATE TABLE NVTX_EVENTS (start, end, text, globalTid)", "no CUDA activity"),
        (
            "CREATE TABLE NVTX_EVENTS (begin, finish)",
            "table NVTX_EVENTS has no column start, end, globalTid; it has: begin, finish",
        ),
    ],
)
def test_a_database_that_is_no_such_export(tmp_path, statement, message):
    """A file that only looks like one is named for what it lacks."""
    path = tmp_path / "a.sqlite"
    database = sqlite3.connect(path)
    database.execute(statement)
    if "begin" in statement:
        for table in ("RUNTIME (start, correlationId, globalTid)", "KERNEL (start, end, correlationId)"):
            database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_{table}")
    database.close()
    with pytest.raises(FormatError, match=message):
        read_nsys(path)


def test_ranges_of_another_program_are_refused(tmp_path):
    """The names that are there are said."""
    with Export(tmp_path / "a.sqlite") as export:
        export.range("forward", 100, 200, MAIN)
        export.launch(110, 300, 340, MAIN)
    with pytest.raises(FormatError, match="none called 'step N' or 'call_pipeline' \\(it has: forward\\)"):
        steps_of([read_nsys(tmp_path / "a.sqlite")])
