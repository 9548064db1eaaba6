"""What a run's record and its ranks' files say of the job: running, still, gone; and files of hostile hands."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from small_records import record_of

from chimera.errors import FormatError
from chimera.train.job import look_at
from chimera.train.status import RankStatus, read_status, status_path, write_status

NOW = 2000.0
HERE = "node1"


def status(rank, **values):
    """Return what a rank in the middle of step 8 says, a moment ago."""
    return RankStatus(
        **{
            "rank": rank,
            "host": HERE,
            "process_id": os.getpid(),
            "time_s": NOW - 0.5,
            "interval_s": 1.0,
            "activity": "step 8",
            "position": 3,
            "action": "0F1",
            "unchanged_s": 0.2,
            "awaited": None,
            "waited_s": None,
            "step": 8,
            "step_s": 0.5,
            "tokens_per_s": 400.0,
            "idle_share": 0.25,
            "memory_bytes": 2**30,
            "device_bytes": None,
            "end": None,
        }
        | values
    )


def look(folder, *statuses, **record):
    """Write the statuses of a job of three ranks and look at it."""
    for each in statuses:
        write_status(each, folder)
    return look_at(folder, record_of(started_s=NOW - 100, **record), now_s=NOW, host=HERE)


@pytest.fixture(scope="module")
def gone():
    """Return the number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def states(view):
    return [each.state for each in view.ranks]


def test_a_status_is_read_as_written(tmp_path):
    """A rank's file gives the same value back, and a rank without a file said nothing."""
    said = status(1, awaited=0, waited_s=1.5, device_bytes=5)
    write_status(said, tmp_path)
    assert read_status(tmp_path, 1) == said
    assert read_status(tmp_path, 0) is None


def test_a_job_runs(tmp_path):
    """Ranks that spoke a moment ago run, one that waits for a message waits for its sender."""
    view = look(tmp_path, status(0), status(1, awaited=0, waited_s=0.75), status(2))
    assert (view.state, view.reason, view.step, view.goes_on) == ("running", None, 8, True)
    assert states(view) == ["running", "waiting", "running"]
    assert (view.ranks[1].waits_for, view.ranks[1].waits_s) == ((0,), 0.75)


def test_nobody_has_spoken_yet(tmp_path):
    """Without a word the job starts; words of an earlier start are none."""
    assert look(tmp_path).state == "starting"
    view = look(tmp_path, status(0, time_s=NOW - 101))
    assert (view.state, states(view)) == ("starting", ["unknown"] * 3)


def test_at_the_end_of_its_program_a_rank_waits_for_those_behind(tmp_path):
    """Who is through with its program waits for the ranks that are still in it, or in an earlier step."""
    through = {"activity": "step 8, waiting for reductions and sends under way", "position": None, "action": None}
    view = look(tmp_path, status(0, **through, unchanged_s=3.0), status(1), status(2, step=7, position=None))
    assert (view.ranks[0].waits_for, view.ranks[0].waits_s) == ((1, 2), 3.5)


def test_a_rank_that_stands_still_is_the_cause(tmp_path):
    """Of ranks at one place for long, the one that waits for nobody is named; long steps take longer to be long."""
    waiting = {"unchanged_s": 30.0, "waited_s": 30.0}
    still = status(1, unchanged_s=31.0)
    view = look(tmp_path, status(0, awaited=1, **waiting), still, status(2, awaited=1, **waiting))
    assert (view.state, view.reason) == ("stalled", "rank 1 at one place for 32 s")
    assert states(view) == ["stalled"] * 3
    assert look(tmp_path, *(status(rank, unchanged_s=31.0, step_s=10.0) for rank in range(3))).state == "running"


def test_a_dead_process_is_told_from_a_silent_one(tmp_path, gone):
    """On this host a process is asked for; elsewhere only its silence counts, and later."""
    dead, elsewhere = {"process_id": gone, "time_s": NOW - 4}, {"host": "node2", "process_id": gone}
    view = look(tmp_path, status(0, **dead), status(1, **elsewhere, time_s=NOW - 4), status(2))
    assert (view.state, view.reason) == ("failing", "rank 0: no word for 4 s")
    assert states(view) == ["dead", "running", "running"]
    view = look(tmp_path, status(1, **elsewhere, time_s=NOW - 40), status(2, **dead))
    assert states(view) == ["dead", "silent", "dead"]
    assert (view.state, view.reason, view.goes_on) == ("dead", "no rank has said anything for 4 s", False)


def test_a_failed_rank_says_why(tmp_path, gone):
    """A rank that ended by an error names it while the others go on, and when they are gone too."""
    view = look(tmp_path, status(0), status(1, end="failed: out of memory"), status(2))
    assert (view.state, view.reason) == ("failing", "rank 1 failed: out of memory")
    dead = {"process_id": gone, "time_s": NOW - 4}
    view = look(tmp_path, status(0, **dead), status(2, **dead))
    assert (view.state, view.reason, view.goes_on) == ("dead", "rank 1 failed: out of memory", False)


def test_ranks_that_all_finished_are_a_finished_job(tmp_path):
    """Where the record's end is missing, as when the first rank was lost behind its last step, theirs count."""
    view = look(tmp_path, *(status(rank, end="finished", time_s=NOW - 50) for rank in range(3)))
    assert (view.state, view.goes_on) == ("finished", False)


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [("finished", "finished", None), ("interrupted", "interrupted", None), ("failed: it broke", "failed", "it broke")],
)
def test_an_end_that_was_written_counts(tmp_path, end, state, reason):
    """Whatever the ranks said last, the record's end is the job's."""
    view = look(tmp_path, status(0, time_s=NOW - 90), end=end)
    assert (view.state, view.reason, view.goes_on) == (state, reason, False)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 60_000,
        b'{"format": "chimera-status", "version": 1}',
        b" " * 100_000,
        b'{"format": "chimera-status", "version": 1, "rank": NaN}',
    ],
    ids=["empty", "half", "binary", "nested", "keyless", "large", "nan"],
)
def test_a_file_that_is_no_status_is_named(tmp_path, content):
    """Such a file makes its rank unreadable, with the reason, and hides no other rank."""
    write_status(status(0), tmp_path)
    path = status_path(tmp_path, 1)
    path.write_bytes(content)
    view = look(tmp_path)
    assert states(view) == ["running", "unreadable", "unknown"]
    assert str(path) in view.ranks[1].note


@pytest.mark.parametrize(
    "change",
    [{"rank": 2}, {"step": "8"}, {"time_s": "inf"}, {"process_id": -1.5}, {"extra": 1}, {"action": ["0F1"]}],
    ids=lambda change: next(iter(change)),
)
def test_a_status_with_a_wrong_value_is_refused(tmp_path, change):
    """Values of another type, unknown keys and another rank's number are errors, not guesses."""
    write_status(status(1), tmp_path)
    path = status_path(tmp_path, 1)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=r"rank-00001\.json: "):
        read_status(tmp_path, 1)


def test_a_folder_or_pipe_in_its_place_is_refused(tmp_path):
    """Nothing is opened that could keep the reader waiting."""
    path = status_path(tmp_path, 0)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(FormatError, match="is no file of at most"):
        read_status(tmp_path, 0)


def test_nobody_asks_for_processes_that_cannot_be(tmp_path):
    """A process number out of range, as only a foreign hand writes it, is no running process or an error."""
    strange = [replace(status(rank), time_s=NOW - 4, process_id=number) for rank, number in enumerate((0, -5, 2**70))]
    assert look(tmp_path, *strange).ranks[0].state == "dead"
