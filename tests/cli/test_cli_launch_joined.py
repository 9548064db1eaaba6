"""Runs of torchrun, of a script on two hosts and of ``chimera launch local``: losses, restarts, sockets."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import two_hosts
from promises import END_AFTER_DEATH_S
from small_runs import Command, Running, await_checkpoint, children, living, small_overrides

from chimera.cli.main import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")
CHIMERA = [sys.executable, "-m", "chimera"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "chimera"]
BEGIN_S = 90.0
LONG = ["--train.steps", "120", "--train.checkpoint-interval", "20", "--train.evaluation-interval", "1000"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give one folder to all runs of this module, so that the corpus is tokenised once."""
    return tmp_path_factory.mktemp("cli-launch-joined")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Have every rank compute on one thread, as torchrun does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def words(folder, out, *more):
    """Return the words after ``chimera`` for a small run into ``out``."""
    return ["train", CONFIG, *small_overrides(folder), *LONG, "--train.out", str(folder / out), *more]


def losses(folder, out):
    """Return what a run's metrics say of its steps, but for times."""
    rows = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "mlm_loss", "nsp_loss", "grad_norm", "lr")} for row in rows]


@pytest.fixture(scope="module")
def unbroken(folder):
    """Make the same run on two processes here, without a break, and return its losses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert main(words(folder, "unbroken")) == 0
    return losses(folder, "unbroken")


def await_row(folder, out, process):
    """Wait until a run has written the metrics of a step."""
    path = folder / out / "metrics.jsonl"
    deadline = time.monotonic() + BEGIN_S
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.01)


def workers_of(agent):
    """Return the ranks that torchrun has started, in their order."""
    return sorted(living(children(agent)))


def test_a_killed_worker_of_torchrun_is_started_again(folder, unbroken):
    """After a restart the run goes on from its newest checkpoint by itself, says so, and ends as an unbroken one."""
    command = [*TORCHRUN[:3], "--max-restarts", "1", *TORCHRUN[3:], *words(folder, "restarted")]
    with Command(command) as agent:
        await_checkpoint(folder / "restarted", lambda: agent.poll() is None)
        os.kill(workers_of(agent.pid)[1], signal.SIGKILL)
        out, err = agent.communicate(timeout=120)
    assert agent.returncode == 0, err
    step = int(re.search(r"^restart 1  goes on from \S+/restarted/checkpoints/step-(\d+)$", out, flags=re.MULTILINE)[1])
    assert f"from step {step}\n" in out
    assert losses(folder, "restarted") == unbroken


def test_a_killed_process_of_launch_local_is_started_again(folder, unbroken, capfd):
    """Ranks of this host are started again too; what killed the first ones is said, and the losses are the same."""
    command = ["launch", "local", *words(folder, "local")[1:], "--restarts", "1"]
    with Running(command, folder / "local") as run:
        os.kill(run.ranks[1], signal.SIGKILL)
        run.end(120)
    out, err = capfd.readouterr()
    assert run.code == 0, err
    assert err.startswith("error: rank 1 was ended by SIGKILL")
    assert re.search(r"^restart 1  goes on from \S+/local/checkpoints/step-\d+$", out, flags=re.MULTILINE)
    assert losses(folder, "local") == unbroken


@pytest.mark.long
def test_an_attempt_that_never_began_is_not_gone_on_from(folder, unbroken):
    """Torchrun's second attempt at a run that is somebody else's is refused as the first was."""
    before = (folder / "unbroken" / "metrics.jsonl").read_bytes()
    command = [*TORCHRUN[:3], "--max-restarts", "1", *TORCHRUN[3:], *words(folder, "unbroken")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("unbroken holds a run already; go on with it by --resume") == 4
    assert "restart 1" not in done.stdout
    assert (folder / "unbroken" / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_no_rank_outlives_torchruns_agent(folder):
    """When the agent is killed its ranks end by themselves and say why."""
    with Command([*TORCHRUN, *words(folder, "orphans", "--train.steps", "100000")]) as agent:
        await_checkpoint(folder / "orphans", lambda: agent.poll() is None)
        ranks = workers_of(agent.pid)
        agent.kill()
        _, err = agent.communicate(timeout=60)
    deadline = time.monotonic() + END_AFTER_DEATH_S
    while living(ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert living(ranks) == []
    assert re.search(r"error: rank 0 ends because the process that started it \(number \d+\) was ended", err)


@pytest.mark.long
@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGSTOP, 3.0), (signal.SIGKILL, 0.0)], ids=["stopped", "killed"])
def test_the_first_rank_does_not_take_the_store_along(folder, how, within_s):
    """When the rank that is to hold the store stalls or dies, the others still say what every rank was doing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    out = f"first-{how.name}"
    # No save, in which ranks do not know what the others are doing.
    more = ["--train.steps", "100000", "--train.checkpoint-interval", "100000", "--runtime.timeout-s", "3"]
    command = [*CHIMERA, *words(folder, out, *more)]
    environ = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        Command(command, env=environ | {"RANK": "0"}) as first,
        Command(command, env=environ | {"RANK": "1"}) as second,
    ):
        await_row(folder, out, first)
        first.send_signal(how)
        _, err = second.communicate(timeout=within_s + END_AFTER_DEATH_S)
        first.kill()
    assert second.returncode == 1
    assert re.search(r"what every rank was doing:(\n  rank \d: .+){2}", err), err


def listening(process_id):
    """Return the addresses that the sockets of a process's network listen on."""
    found = set()
    for table, length in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/{process_id}/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A":
                raw = bytes.fromhex(local.partition(":")[0])
                native = struct.pack(f">{length // 4}I", *struct.unpack(f"<{length // 4}I", raw))
                found.add(socket.inet_ntop(socket.AF_INET if length == 4 else socket.AF_INET6, native))
    return found


def test_two_hosts_train_as_one_does(folder, unbroken):
    """One rank on each of two hosts makes the same losses, over their network alone; only the first says anything."""
    if reason := two_hosts.missing():
        pytest.skip(reason)
    with two_hosts.two_hosts() as hosts:
        ranks = []
        for rank, host in enumerate(hosts):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": 2,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": two_hosts.ADDRESSES[0],
                "MASTER_PORT": 4711,
            }
            environ = os.environ | {name: str(value) for name, value in variables.items()}
            command = [*host, *CHIMERA, *words(folder, "hosts", "--runtime.interface", two_hosts.NETWORK)]
            ranks.append(Command(command, env=environ))
        seen = [set(), set()]
        while any(rank.poll() is None for rank in ranks):
            for addresses, rank in zip(seen, ranks, strict=True):
                with suppress(OSError):
                    # Until it has moved to its host, a process has the network of this test.
                    if Path(f"/proc/{rank.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink():
                        addresses.update(listening(rank.pid))
            time.sleep(0.05)
        outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[0][0].startswith("model     BERT")
    assert outputs[1][0] == ""
    assert seen == [{address} for address in two_hosts.ADDRESSES]
    assert losses(folder, "hosts") == unbroken
