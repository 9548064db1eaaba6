"""``chimera launch ray``: real clusters on this host, lost processes, and what is said of wrong options."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from promises import END_AFTER_DEATH_S
from small_runs import Command, small_overrides

from chimera.cli import launch_ray
from chimera.cli.main import main
from chimera.launch.ray.cluster import stop_cluster

CHIMERA = [sys.executable, "-m", "chimera"]
CONFIG = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")
NODES = Path(__file__).parents[1] / "launch" / "ray_nodes.py"
LONG = ["--train.steps", "100000", "--train.evaluation-interval", "100000", "--train.checkpoint-interval", "20"]
WAIT_S = 120

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray, of the extra 'ray'")


@pytest.fixture(scope="module")
def cluster():
    """Give a cluster of three nodes with a core each, on the loopback interface, that asks for a token."""
    # Below the system's folder, for its sockets' names may not be long.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        command = [sys.executable, str(NODES), folder, "1", "1", "1"]
        with Command(command, stdin=subprocess.PIPE, stderr=None) as process:
            told = json.loads(process.stdout.readline())
            yield SimpleNamespace(token=f"{folder}/token", **told)
            process.stdin.close()
            process.wait(WAIT_S)


@pytest.fixture(autouse=True)
def no_cluster(tmp_path, monkeypatch):
    """Begin each test where no cluster was started, and none is named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    stop_cluster()


def environ(cluster=None, **more):
    """Return the environment of a command: one thread per rank, and the cluster's token."""
    token = {} if cluster is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": cluster.token}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **token, **more}


def started(words, folder, env):
    return Command([*CHIMERA, *words], stderr=subprocess.STDOUT, env=env, cwd=folder)


def lines_until(process, what):
    """Return the lines that a command prints, up to the first with ``what``."""
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if what in line:
            return lines
    raise AssertionError("\n".join(["the command ended without it:", *lines]))


def workers(cluster):
    """Return the ranks' processes as (process, its node's daemon)."""
    return [
        (child.pid, raylet)
        for raylet in cluster.raylets
        if psutil.pid_exists(raylet)
        for child in psutil.Process(raylet).children()
        if "RankWorker" in "".join(child.cmdline())
    ]


def losses(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@needs_ray
def test_two_nodes_train_as_this_host_does(cluster, tmp_path, monkeypatch):
    """Each of two nodes gets a rank, prepared by the commands given; every loss is that of a local run, bit for bit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = [CONFIG, *small_overrides(tmp_path)]
    assert main(["train", *small, "--train.out", str(tmp_path / "runs" / "local")]) == 0
    more = ["--workers", "2", "--address", cluster.address, "--env", "GREETING=well met"]
    before = ["--before", "sh -c 'echo $GREETING'"]
    words = ["launch", "ray", *small, "--train.out", "runs/ray", *more, *before]
    with started(words, tmp_path, environ(cluster)) as on_ray:
        said, _ = on_ray.communicate(timeout=WAIT_S)
    assert on_ray.returncode == 0, said
    lines = said.splitlines()
    assert lines[0] == f"cluster   {cluster.address}"
    assert [line for line in lines if line.startswith("node  ")] == [
        "node      127.0.0.1: rank 0",
        "node      127.0.0.1: rank 1",
    ]
    assert lines.count("node 127.0.0.1 | well met") == 2
    assert lines[-1] == "newest checkpoint runs/ray/checkpoints/step-00000004"
    assert len(losses(tmp_path / "runs" / "ray")) == 4
    assert losses(tmp_path / "runs" / "ray") == losses(tmp_path / "runs" / "local")


@needs_ray
def test_lost_ranks_start_again_up_to_a_limit(cluster, tmp_path):
    """A killed process has all ranks go on from the checkpoint; the next loss, of a whole node, is one too many."""
    words = ["launch", "ray", CONFIG, *small_overrides(tmp_path), *LONG, "--address", cluster.address]
    with started([*words, "--restarts", "1"], tmp_path, environ(cluster)) as process:
        lines_until(process, "saved ")
        [(first, _), _] = workers(cluster)
        os.kill(first, signal.SIGKILL)
        said = "\n".join(lines_until(process, "restart 1"))
        assert re.search(rf"failed    rank \d ended before it was done: its process {first} on 127.0.0.1 is gone", said)
        assert "what every rank was doing:" in said
        assert "all ranks start again, 1 of 1 times" in said
        assert re.search(r"restart 1  goes on from .*checkpoints/step-000000\d0$", said)
        lines_until(process, "saved ")
        [_, (second, daemon)] = workers(cluster)
        os.kill(daemon, signal.SIGKILL)
        said, _ = process.communicate(timeout=END_AFTER_DEATH_S)
    assert process.returncode == 1
    last = said[said.index("error: ") :]
    # What a rank itself still says of it may stand before.
    assert re.search(r"(?m)^error: rank \d was lost with its node 127.0.0.1, where Ray's daemon has ended$", last), said
    assert "what every rank was doing:" in last
    assert re.search(rf"all ranks had been started again, after\n  1. rank \d .* process {first} on .*\n$", last), said
    assert workers(cluster) == []
    assert not psutil.pid_exists(second)


@pytest.mark.long
@needs_ray
def test_a_cluster_of_our_own(cluster, tmp_path):
    """It listens on the loopback interface alone, keeps its token to its user, and --down stops it and no other."""
    env = environ()
    words = ["launch", "ray", CONFIG, *small_overrides(tmp_path), "--before", "sh -c 'echo oh no; exit 3'"]
    failed = subprocess.run(
        [*CHIMERA, *words, "--cpus-per-rank", "0.5"], capture_output=True, text=True, check=False, env=env, cwd=tmp_path
    )
    assert failed.returncode == 1
    assert (
        failed.stderr == "error: --before 'sh -c echo oh no; exit 3' ended with code 3 on 127.0.0.1, saying:\n  oh no\n"
    )
    assert not (tmp_path / "run").exists()
    [record] = (tmp_path / "chimera").iterdir()
    told = json.loads(record.read_text())
    folder, holder = Path(told["folder"]), psutil.Process(told["process"])
    assert f"cluster   {told['address']}, started; token in {folder}/token" in failed.stdout.splitlines()
    assert [path.stat().st_mode & 0o077 for path in (folder, folder / "token")] == [0, 0]
    assert (folder / "token").read_text() not in failed.stdout + failed.stderr + record.read_text()
    listening = {
        connection.laddr.ip
        for process in [holder, *holder.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
    for said in (
        f"stopped the Ray cluster at {told['address']}\n",
        "no Ray cluster runs here that chimera launch ray has started, so nothing was stopped\n",
    ):
        done = subprocess.run(
            [*CHIMERA, "launch", "ray", "--down"], capture_output=True, text=True, check=True, env=env, cwd=tmp_path
        )
        assert (done.stdout, done.stderr) == (said, "")
    assert not holder.is_running()
    assert not folder.exists()
    assert psutil.pid_exists(cluster.head)


@needs_ray
def test_a_token_is_asked_for(cluster, capfd, monkeypatch):
    """Without its token a cluster does not take anybody, and Ray says where it would look for one."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert main(["launch", "ray", CONFIG, "--address", cluster.address]) == 1
    assert re.match(
        rf"error: the Ray cluster at {cluster.address} does not take us: .*token is missing or incorrect.*"
        "RAY_AUTH_TOKEN_PATH",
        capfd.readouterr().err,
    )


@needs_ray
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--workers", "3"],
            r"--workers 3, but the configuration makes 2 ranks = 2 pipeline x 1 data x 1 tensor; set --workers to 2,",
        ),
        (["--address", "10.0.0.1"], r"--address '10.0.0.1'; needed: host:port of the cluster's head"),
        (["--address", "ray://h:1"], r"--address 'ray://h:1'; .*Ray's client is not supported, so start from a node"),
        (["--cpus-per-rank", "1.5"], r"--cpus-per-rank 1.5; needed: a whole number, or a part of 1"),
        (["--restarts", "-1"], r"--restarts -1; needed: 0 or more"),
        (["--wait-s", "0"], r"--wait-s 0; needed: seconds above 0"),
        (["--before", "echo 'half"], r"--before \"echo 'half\" cannot be split into words: No closing quotation"),
        (["--before", ""], r"--before is empty; give a program and its arguments"),
        (["--env", "CHIMERA_UNSET"], r"--env CHIMERA_UNSET: this host has no variable of that name; give its value as"),
        (["--env", "1=2"], r"--env '1'; needed: NAME or NAME=VALUE"),
        (["--working-dir", "nowhere"], r"--working-dir nowhere is no folder"),
        (["--working-dir", "."], r"out = 'runs/bert-tiny' would be a folder inside each node's copy of --working-dir"),
        (["--down"], r"--down stops the cluster that was started here and trains nothing; leave out .*bert-tiny.toml"),
    ],
)
def test_wrong_options_are_refused(more, message, capfd):
    """Before anything is started, an option that cannot be is named with what it should be."""
    assert main(["launch", "ray", CONFIG, *more]) == 2
    assert re.search(message, capfd.readouterr().err)


@needs_ray
def test_an_address_where_nobody_is(capfd):
    """An address that does not answer is named, with what can be done."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["launch", "ray", CONFIG, "--address", f"127.0.0.1:{port}"]) == 1
    assert re.match(
        rf"error: no Ray cluster answers at 127.0.0.1:{port}: Connection refused; .*leave --address out to have one",
        capfd.readouterr().err,
    )


@needs_ray
def test_a_configuration_is_needed(capfd):
    """Without a configuration and without --down there is nothing to do."""
    assert main(["launch", "ray"]) == 2
    assert "needs a configuration file, such as configs/bert-tiny.toml, or --down" in capfd.readouterr().err


def test_without_ray(capfd, monkeypatch):
    """Where ray is not installed, the extra that brings it is named."""
    monkeypatch.setattr(launch_ray, "find_spec", lambda _: None)
    assert main(["launch", "ray", CONFIG]) == 2
    assert capfd.readouterr().err == (
        "error: chimera launch ray needs the package ray, which is not installed; needed: the extra 'ray', as in: "
        "pip install 'chimera-pipeline[ray]'\n"
    )
