"""A rank that dies or stalls ends the job in bounded time, and the last words say what every rank was doing."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from promises import END_AFTER_DEATH_S, END_AFTER_TIME_OUT_S
from small_runs import Command

import chimera

PROGRAM = Path(__file__).with_name("runtime_victim.py")
STARTER = -1


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit code and seconds after the victim's fate by rank, and each rank's last words."""

    codes: dict
    after_s: dict
    words: dict


@pytest.fixture(scope="module")
def program():
    """Start the program that runs jobs, once for all of them."""
    path = os.pathsep.join([str(Path(chimera.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(PROGRAM)]
    with Command(command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stderr=None) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run_job(program, tmp_path):
    """Run jobs of their own processes, none of which is left behind."""

    def run(world, victim, *, fate, timeout_s, host=STARTER):
        job = {"folder": str(tmp_path), "world": world, "victim": victim, "fate": fate, "timeout_s": timeout_s}
        print(json.dumps(job | {"host": host}), file=program.stdin, flush=True)
        session = int(program.stdout.readline())
        try:
            assert wait([program.stdout], 90.0), "the job did not end"
            output = program.stdout.readline()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        ended = {int(rank): how for rank, how in json.loads(output).items()}
        return Ended(
            {rank: code for rank, (code, _) in ended.items() if rank != victim},
            {rank: after for rank, (_, after) in ended.items() if rank != victim},
            {rank: (tmp_path / f"{rank}.err").read_text() for rank in range(world) if rank != victim},
        )

    return run


def assert_all_gave_up(ended, others, limit_s):
    """Every other rank ended in time with exit code 1 and a named error."""
    assert ended.codes == dict.fromkeys(others, 1), ended.words
    assert max(ended.after_s.values()) < limit_s
    for rank, words in ended.words.items():
        assert re.search(rf"StalledError: rank {rank} gave up: \w+", words), words


def assert_one_report(ended, world, victim, action):
    """One rank printed the grid, marked, and what each rank was doing; the victim's action is named."""
    reports = [words for words in ended.words.values() if "what every rank was doing:" in words]
    assert len(reports) == 1, ended.words
    (report,) = reports
    assert re.search(r"position +\S+ +\d", report)
    assert report.count("<-- HERE") >= 1
    doing = dict(re.findall(r"^(?:\[rank\d\]: )?  rank (\d+): (.*)$", report, re.MULTILINE))
    assert sorted(doing) == [str(rank) for rank in range(world)]
    for text in doing.values():
        waits = r"(, waiting for rank \d+ for [\d.]+ s)?"
        assert re.fullmatch(rf"step 2, (at action \d+: \w+{waits}|waiting for reductions and sends under way)", text), (
            report
        )
    assert re.fullmatch(rf"step 2, at action \d+: {action}", doing[str(victim)]), report
    assert f", waiting for rank {victim} for " in report


@pytest.mark.parametrize(("world", "victim", "action"), [(4, 2, "2F1"), (8, 1, "0F1")])
def test_a_killed_rank_ends_the_job(run_job, world, victim, action):
    """SIGKILL in the middle of a step, with one or two replicas: the others exit within ten seconds and name it."""
    ended = run_job(world, victim, fate="kill", timeout_s=300)
    assert_all_gave_up(ended, set(range(world)) - {victim}, END_AFTER_DEATH_S)
    assert_one_report(ended, world, victim, action)


@pytest.mark.parametrize("fate", ["stop", "sleep"])
def test_a_stalled_rank_ends_the_job_within_the_time_out(run_job, fate):
    """A rank that is stopped or sleeps: the others exit within the time-out and ten seconds, and name its action."""
    ended = run_job(4, 1, fate=fate, timeout_s=3)
    assert_all_gave_up(ended, {0, 2, 3}, 3 + END_AFTER_TIME_OUT_S)
    assert_one_report(ended, 4, 1, "1F1")


def test_the_death_of_the_rank_that_hosts_the_store_ends_the_job(run_job):
    """Without the store nobody can say what the others did, but all exit within ten seconds, and say that."""
    ended = run_job(4, 0, fate="kill", timeout_s=300, host=0)
    assert_all_gave_up(ended, {1, 2, 3}, END_AFTER_DEATH_S)
    assert any("the job's store is gone too" in words for words in ended.words.values())
