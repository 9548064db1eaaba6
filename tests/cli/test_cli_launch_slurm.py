"""``chimera launch slurm`` on a real cluster of two nodes: the losses of one host, and how a job ends."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import slurm_cluster
from promises import END_AFTER_DEATH_S
from small_runs import living, small_overrides

from chimera.cli.main import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")
BEGIN_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give one folder to all runs of this module, so that the corpus is tokenised once."""
    return tmp_path_factory.mktemp("cli-launch-slurm")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Run a cluster of two nodes, and make it the one that SLURM's programs ask."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch, slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as conf:
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield conf


def words(folder, out, *more):
    """Return the words after a command for a small run of as many ranks as ``more`` says."""
    return [CONFIG, *small_overrides(folder), "--train.out", str(folder / out), *more]


def losses(folder, out):
    """Return what a run's metrics say of its steps, but for times."""
    rows = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "mlm_loss", "nsp_loss", "grad_norm", "lr")} for row in rows]


SLURM = ["launch", "slurm", "--nodes", "2", "--tasks-per-node"]


def test_two_nodes_train_as_one_host_does(cluster, folder, capfd):
    """On two nodes with two tasks each the losses are those of four ranks here, bit for bit, and the log is shown."""
    assert main(["train", *words(folder, "here", "--parallel.pipeline", "4")]) == 0
    capfd.readouterr()
    more = ["--parallel.pipeline", "4", "--before", "echo 'once  per node'", "--env", "WORDS=it's; $HOME"]
    assert main([*SLURM, "2", *words(folder, "there", *more)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    number = re.match(r"job       (\d+) on 2 nodes, 4 tasks; log \S+/slurm-\1.log, script \S+/slurm.sh\n", out)[1]
    assert out.count("once  per node\n") == 2
    assert "step 4  MLM" in out
    assert losses(folder, "there") == losses(folder, "here")
    assert (folder / "there" / f"slurm-{number}.log").read_text().splitlines()[-1] in out
    assert sorted(path.name for path in (folder / "there").iterdir() if path.name.startswith(".")) == []


class Launched:
    """A long job of two ranks, one on each node, launched in another thread."""

    def __init__(self, folder, out):
        self.code = None
        self._out = folder / out
        long = ["--train.steps", "100000", "--train.checkpoint-interval", "10", "--train.evaluation-interval", "100000"]
        self._words = [*SLURM, "1", *words(folder, out, *long)]
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        deadline = time.monotonic() + BEGIN_S
        while not list(self._out.glob("checkpoints/step-*/checkpoint.json")):
            assert self._thread.is_alive()
            assert time.monotonic() < deadline, "the job did not begin"
            time.sleep(0.1)
        (log,) = self._out.glob("slurm-*.log")
        self.number = int(log.stem.partition("-")[2])
        self.tasks = slurm_cluster.tasks_of(self.number)
        return self

    def __exit__(self, *_):
        subprocess.run(["scancel", "--user=root"], check=True)
        self._thread.join(END_AFTER_DEATH_S)

    def _run(self):
        self.code = main(self._words)

    def end(self):
        """Wait for the command's end, and see that no task outlives it."""
        self._thread.join(END_AFTER_DEATH_S)
        assert not self._thread.is_alive(), "the job went on"
        deadline = time.monotonic() + 10.0
        while living(self.tasks.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert living(self.tasks.values()) == []


def kill_task(job):
    os.kill(job.tasks[1], signal.SIGKILL)


def kill_srun(job):
    """Kill what the batch script has become."""
    os.kill(min(slurm_cluster.processes_of(job.number, "srun")), signal.SIGKILL)


def kill_node_daemon(job):
    """Kill the process that started a task and passes its output on."""
    os.kill(slurm_cluster.parent_of(job.tasks[1]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kill", "causes"),
    [
        (
            kill_task,
            [r"job \d+ ended as FAILED.* with exit code 137; its log is \S+", r"srun: error: .*task 1: Killed"],
        ),
        (kill_srun, [r"job \d+ ended as \w+.* with exit code 137; its log is \S+"]),
        pytest.param(
            kill_node_daemon,
            [r"job \d+ ended as FAILED.* with exit code 1; its log is \S+", r"error: rank 0 gave up"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["task", "srun", "slurmstepd"],
)
def test_any_killed_process_ends_the_job(cluster, folder, capfd, kill, causes):
    """When a task, srun or a step's daemon is killed, the job ends, and the last lines say why and where the log is."""
    with Launched(folder, f"killed-{kill.__name__}") as job:
        kill(job)
        job.end()
        assert job.code not in {0, None}
    err = capfd.readouterr().err
    assert err.startswith("error: job ")
    for cause in causes:
        assert re.search(cause, err), err
