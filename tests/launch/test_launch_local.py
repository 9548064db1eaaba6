"""Ranks as processes of this host: results, messages, and every way in which one of them may end."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from promises import END_AFTER_DEATH_S
from small_runs import living

from chimera.errors import DataError, NonFiniteError, RunError, StalledError
from chimera.launch import connected, run_local

TIMEOUT_S = 15.0


def summed(place, tell):
    """Sum the ranks' numbers and say what this one sees."""
    tell("connecting")
    with connected(place, timeout_s=TIMEOUT_S) as group:
        number = torch.tensor([float(place.rank)])
        dist.all_reduce(number, group=group)
        tell({"rank": place.rank})
        return place.rank, float(number), os.environ.get("CHIMERA_TEST"), str(Path.cwd()), os.getpid()


def listening_sockets(place, tell):
    """Return the addresses that this process and its parent's store listen on."""
    with connected(place, timeout_s=TIMEOUT_S):
        held = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()}
        return [
            (fields[1], f"socket:[{fields[9]}]" in held)
            for table in ("tcp", "tcp6")
            for fields in map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:])
            if fields[3] == "0A"
            and (f"socket:[{fields[9]}]" in held or int(fields[1].rpartition(":")[2], 16) == place.store.port)
        ]


def ends(how, ending_rank, place, tell):
    """Take part in one sum; then one rank ends as ``how`` says while the others wait for it."""
    tell("connecting")
    with connected(place, timeout_s=TIMEOUT_S) as group:
        dist.all_reduce(torch.zeros(1), group=group)
        tell("working")
        if place.rank == ending_rank:
            how()
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:
            raise StalledError(f"rank {place.rank} gave up") from error


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def left():
    os._exit(3)


def raises_data_error():
    raise DataError("the corpus is gone")


def divides_by_zero():
    return 1 // 0


class AwkwardError(Exception):
    """An exception that cannot be made again from its text."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises_awkwardly():
    raise AwkwardError("this", "that")


def all_raise(place, tell):
    raise NonFiniteError(f"step 3 on rank {place.rank}")


def stalls(place, tell):
    """Raise as ranks do whose peer stalled: one with the report, the others with a line, one not at all."""
    if place.rank == 3:
        time.sleep(600)
    time.sleep(0.2 * (place.rank == 1))
    report = "\nwhat every rank was doing:\n  rank 3: nothing" if place.rank == 1 else ""
    raise StalledError(f"rank {place.rank} gave up{report}")


def test_results_come_in_rank_order(monkeypatch, tmp_path):
    """Every rank runs in a process of its own, in the caller's folder and environment, and its result comes back."""
    monkeypatch.setenv("CHIMERA_TEST", "as it is now")
    monkeypatch.chdir(tmp_path)
    messages = []
    results = run_local(summed, 3, on_message=lambda rank, message: messages.append((rank, message)))
    assert [result[:4] for result in results] == [(rank, 3.0, "as it is now", str(tmp_path)) for rank in range(3)]
    assert len({result[4] for result in results} | {os.getpid()}) == 4
    assert sorted(messages, key=lambda pair: pair[0]) == [(rank, {"rank": rank}) for rank in range(3)]
    assert living(result[4] for result in results) == []


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("1,2", 1), (None, max(1, len(os.sched_getaffinity(0)) // 2))])
def test_threads_of_a_rank(monkeypatch, said, threads):
    """A rank has as many threads as OMP_NUM_THREADS says now, or its share of the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert run_local(threads_of, 2) == [threads] * 2


def threads_of(place, tell):
    return torch.get_num_threads()


def test_one_rank_needs_no_group():
    """A rank on its own gets no process group."""
    assert run_local(groupless, 1) == [None]


def groupless(place, tell):
    with connected(place, timeout_s=TIMEOUT_S) as group:
        return group


def test_nothing_listens_beyond_the_loopback_interface():
    """The store and every rank listen on 127.0.0.1 only."""
    found = [pair for result in run_local(listening_sockets, 2) for pair in result]
    assert {held for _, held in found} == {
        True,
        False,
    }  # the ranks' own sockets, and the store's, which the parent holds
    assert {address.partition(":")[0] for address, _ in found} == {"0100007F"}


@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        (killed, 1, r"^rank 1 was ended by SIGKILL \(the system does this when memory runs out\)\nrank [02] gave up"),
        (left, 0, r"^rank 0 ended with exit code 3 before it was done\nrank [12] gave up"),
    ],
)
def test_a_rank_that_dies_ends_the_job(how, rank, message):
    """When a rank dies the job ends within ten seconds, naming it, how it ended and what the others say."""
    began = time.monotonic()
    with pytest.raises(RunError, match=message) as caught:
        run_local(partial(ends, how, rank), 3)
    assert time.monotonic() - began < END_AFTER_DEATH_S
    assert caught.value.exit_code == 1


def test_a_rank_that_dies_before_it_connects():
    """Where no survivor can say what went on, the message holds what each rank said last."""
    with pytest.raises(
        RunError, match=r"rank 1 was ended by SIGKILL.*\nwhat every rank was doing:\n  rank 0: waiting\n"
    ):
        run_local(dies_alone, 2)


def dies_alone(place, tell):
    tell("waiting" if place.rank == 0 else "about to die")
    time.sleep(0.2)
    if place.rank == 1:
        killed()
    time.sleep(600)


def test_the_cause_comes_before_what_followed():
    """An error of its own on one rank is raised, not that the others lost it."""
    with pytest.raises(DataError, match=r"^the corpus is gone$"):
        run_local(partial(ends, raises_data_error, 2), 3)


def test_an_error_of_all_ranks_is_raised_once():
    """Where all ranks raise the same, one of them is heard."""
    with pytest.raises(NonFiniteError, match=r"^step 3 on rank \d$"):
        run_local(all_raise, 3)


def test_a_fault_of_ours_keeps_its_traceback():
    """An unexpected exception is raised as it is, with the rank's traceback as a note."""
    with pytest.raises(ZeroDivisionError) as caught:
        run_local(partial(ends, divides_by_zero, 0), 2)
    assert "on rank 0:\nTraceback" in caught.value.__notes__[0]
    assert "in divides_by_zero" in caught.value.__notes__[0]


def test_an_exception_of_any_class_arrives():
    """An exception that would not survive the way between processes arrives as its text."""
    with pytest.raises(RuntimeError, match=r"^AwkwardError: this and that\non rank 0:"):
        run_local(partial(ends, raises_awkwardly, 0), 2)


def test_the_report_of_a_stall_is_preferred():
    """Of ranks that waited in vain, the one that knows what all were doing is heard, and the silent one is ended."""
    began = time.monotonic()
    with pytest.raises(StalledError, match=r"^rank 1 gave up\nwhat every rank was doing:"):
        run_local(stalls, 4)
    assert time.monotonic() - began < END_AFTER_DEATH_S


def test_a_stall_without_a_report():
    """Where a rank waited in vain outside the schedule, what each rank said last stands in its place."""
    with pytest.raises(
        StalledError, match=r"^rank 0 gave up\nwhat every rank was doing:\n  rank 0: saving\n  rank 1: "
    ):
        run_local(stalls_outside, 2)


def stalls_outside(place, tell):
    tell("saving")
    if place.rank == 1:
        time.sleep(600)
    raise StalledError("rank 0 gave up")


def test_a_port_in_use_is_named():
    """A port that somebody listens on is refused before any rank starts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RunError, match=rf"^port {port} on 127.0.0.1 cannot be used: .*set --runtime.port"):
            run_local(summed, 2, port=port)


def test_a_given_port_is_used():
    """The store listens where it is told to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert run_local(port_of, 2, port=port) == [port, port]


def port_of(place, tell):
    with connected(place, timeout_s=TIMEOUT_S):
        return place.store.port


def test_no_rank_outlives_its_parent():
    """When the process that started them is killed, the ranks end at once and by themselves."""
    command = [sys.executable, str(Path(__file__).with_name("launch_parent.py")), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        assert living(ranks) == ranks
        parent.kill()
    deadline = time.monotonic() + END_AFTER_DEATH_S
    while living(ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(ranks) == []
