"""``chimera top``: what it prints of a job, and what it says where there is none."""

import json
import os
import re
import time
from dataclasses import replace

import pytest
from small_records import ORIGIN, record_of

from chimera.cli.main import main
from chimera.train.status import RankStatus, write_status
from chimera.train.tracking.record import TrackerRecord, write_record


def make_run(folder, *, size=2, end=None, **status):
    """Write the files of a job of which each rank has said something a moment ago."""
    now = time.time()
    origin = replace(ORIGIN, hosts=("node1",) * size, devices=("cpu",) * size)
    record = record_of(origin=origin, started_s=now - 100, seen_s=now, step=4, end=end, steps_s=40.0, first_step_s=9.0)
    write_record(replace(record, trackers={"wandb": TrackerRecord(lost_rows=2, first_failure="step 3: gone")}), folder)
    for rank in range(size):
        said = {
            "rank": rank,
            "host": "node1",
            "process_id": os.getpid(),
            "time_s": now,
            "interval_s": 1.0,
            "activity": "step 4",
            "position": 3,
            "action": f"{rank}F1",
            "unchanged_s": 0.5,
            "awaited": 0 if rank else None,
            "waited_s": 1.25 if rank else None,
            "step": 4,
            "step_s": 0.5,
            "tokens_per_s": 12_345.0,
            "idle_share": 0.125,
            "memory_bytes": 2**30,
            "device_bytes": None,
            "end": end,
        }
        write_status(RankStatus(**(said | status)), folder)


def test_one_table_shows_every_rank(tmp_path, capsys):
    """--once prints the state of the job, what its time went into, and a row per rank with whom it waits for."""
    make_run(tmp_path)
    assert main(["top", str(tmp_path), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}  running, step 4 of 10, 12,345 tokens/s, about 1 min 0 s left"
    assert lines[1] == "40.0% of 1 min 40 s in steps that stand; first step after 9.00 s"
    assert lines[4].split() == "rank host state at for waits for step step s tokens/s idle GiB".split()  # noqa: SIM905
    first, second = (re.split(r" {2,}", line) for line in lines[5:7])
    assert first[:4] == ["0", "node1", "running", "step 4: 0F1"]
    assert first[5:] == ["4", "0.500", "12,345", "12.5%", "1.00"]
    assert second[:4] == ["1", "node1", "waiting", "step 4: 1F1"]
    assert second[5] == "0, 1.2 s"
    assert lines[7] == "wandb lost 2 rows; it failed first at step 3: gone"


def test_json_has_all_that_is_known(tmp_path, capsys):
    """--json is one document with the job's state, the summary and every rank."""
    make_run(tmp_path)
    assert main(["top", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["steps"]) == ("running", 4, 10)
    assert found["summary"]["effective_share"] == pytest.approx(0.4)
    assert [(each["state"], each["waits_for"]) for each in found["ranks"]] == [("running", []), ("waiting", [0])]
    assert found["ranks"][1]["status"]["waited_s"] == 1.25


def test_a_job_that_is_over_is_shown_once(tmp_path, capsys):
    """Without --once, too, nothing is waited for where nothing can come."""
    make_run(tmp_path, end="finished")
    assert main(["top", str(tmp_path)]) == 0
    assert f"{tmp_path}  finished, step 4 of 10\n" in capsys.readouterr().out


def test_following_ends_with_the_job(tmp_path, capsys, monkeypatch):
    """Away from a terminal there is a line while the job runs, and its table when it ends."""
    make_run(tmp_path)
    monkeypatch.setattr("chimera.cli.top.time.sleep", lambda _: make_run(tmp_path, end="finished"))
    assert main(["top", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  {tmp_path}  running, step 4 of 10, .*", lines[0])
    assert lines[1] == f"{tmp_path}  finished, step 4 of 10"


def test_control_c_is_how_one_leaves(tmp_path, monkeypatch):
    """An interrupt while following is no failure."""

    def interrupt(_):
        raise KeyboardInterrupt

    make_run(tmp_path)
    monkeypatch.setattr("chimera.cli.top.time.sleep", interrupt)
    assert main(["top", str(tmp_path)]) == 0


def test_text_of_a_file_commands_no_terminal(tmp_path, capsys):
    """Control characters and endless text from a file are shown as what they are: nothing to obey, and cut."""
    make_run(tmp_path, activity="\x1b[2J\x07" + "x" * 1000, host="no\nde")
    assert main(["top", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "no?de" in out
    assert max(map(len, out.splitlines())) < 200


def test_many_ranks_are_all_there(tmp_path, capsys):
    """--once leaves no rank out."""
    make_run(tmp_path, size=100)
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert len(re.findall(r"^\d+ +node1", capsys.readouterr().out, re.MULTILINE)) == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}/none"], r"none is no folder; give the folder of a run, .*chimera top runs/mine; runs here: runs/mine$"),
        ([], r"^error: give the folder of a run, as in: chimera top runs/mine; "),
        (["{}"], r"has no run.json, which a run writes when all of its ranks are ready"),
        (["{}/runs/mine", "--interval", "0"], r"--interval 0: needed: 0.1 to 3600 seconds"),
        (["{}/runs/broken", "--once"], r"run.json: not a chimera-run file"),
    ],
)
def test_a_mistake_says_what_to_type(tmp_path, capsys, monkeypatch, words, message):
    """Where there is no run, the nearest ones are named; a foreign record is named with its place."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "broken"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    make_run(tmp_path / "runs" / "mine")
    if "broken" in str(words):
        (tmp_path / "runs" / "broken" / "run.json").write_text("no")
    assert main(["top", *(word.format(tmp_path) for word in words)]) == 2
    assert re.search(message, capsys.readouterr().err.strip()), message
