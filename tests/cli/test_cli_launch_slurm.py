"""``chimera launch slurm`` on a real cluster of two nodes: the losses of one host, and how a job ends."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import slurm_cluster
from promises import END_AFTER_DEATH_S
from small_runs import Command, await_checkpoint, living, small_overrides

from chimera.cli.main import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")


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


LONG = ["--train.steps", "100000", "--train.checkpoint-interval", "10", "--train.evaluation-interval", "100000"]


def job_of(run):
    """Return the number of the job that a run was handed in as."""
    (log,) = run.glob("slurm-*.log")
    return int(log.stem.partition("-")[2])


class Launched:
    """A long job of two ranks, one on each node, launched in another thread."""

    def __init__(self, folder, out, *more):
        self.code = None
        self._out = folder / out
        self._words = [*SLURM, "1", *words(folder, out, *LONG, *more)]
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        await_checkpoint(self._out, self._thread.is_alive)
        self.number = job_of(self._out)
        self.tasks = slurm_cluster.tasks_of(self.number)
        return self

    def __exit__(self, *_):
        subprocess.run(["scancel", "--user=root"], check=True)
        self._thread.join(END_AFTER_DEATH_S)

    def _run(self):
        self.code = main(self._words)

    def end(self, within_s):
        """Wait for the command's end, and see that no task outlives it."""
        self._thread.join(within_s)
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


@pytest.mark.parametrize(
    ("kill", "causes"),
    [
        (
            kill_task,
            [r"job \d+ ended as FAILED.* with exit code 137; its log is \S+", r"srun: error: .*task 1: Killed"],
        ),
        pytest.param(kill_srun, [r"job \d+ ended as \w+.* with exit code 137; its log is \S+"], marks=pytest.mark.long),
    ],
    ids=["task", "srun"],
)
def test_any_killed_process_ends_the_job(cluster, folder, capfd, kill, causes):
    """When a task or srun is killed, the job ends, and the last lines say why and where the log is."""
    with Launched(folder, f"killed-{kill.__name__}") as job:
        kill(job)
        job.end(END_AFTER_DEATH_S)
        assert job.code == 137
    err = capfd.readouterr().err
    assert err.startswith("error: job ")
    for cause in causes:
        assert re.search(cause, err), err


@pytest.mark.long
def test_a_killed_daemon_of_a_step_ends_its_ranks(cluster, folder, capfd):
    """When a step's slurmstepd is killed its ranks end at once; SLURM gives the step up some time later."""
    with Launched(folder, "no-daemon") as job:
        os.kill(slurm_cluster.parent_of(job.tasks[1]), signal.SIGKILL)
        deadline = time.monotonic() + END_AFTER_DEATH_S
        while living(job.tasks.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert living(job.tasks.values()) == []
        job.end(120.0)
        assert job.code not in {0, None}
    assert re.search(r"\n  error: rank 0 gave up", capfd.readouterr().err)


@pytest.mark.long
def test_a_job_put_back_into_the_queue_goes_on(cluster, folder, capfd):
    """A job that SLURM starts again goes on from its newest checkpoint, as after the loss of a node."""
    with Launched(folder, "requeued", "--train.steps", "400") as job:
        subprocess.run(["scontrol", "requeue", str(job.number)], check=True)
        # SLURM lets a requeued job wait for two minutes.
        job.end(400.0)
        assert job.code == 0
    assert re.search(r"\nrestart 1  goes on from \S+/requeued/checkpoints/step-\d+\n", capfd.readouterr().out)
    assert [row["step"] for row in losses(folder, "requeued")] == list(range(1, 401))


@pytest.mark.long
def test_an_interrupt_cancels_the_job(cluster, folder):
    """Control-C cancels the job, ends its tasks, and names the checkpoint to go on from."""
    command = [sys.executable, "-m", "chimera", *SLURM, "1", *words(folder, "interrupted", *LONG)]
    with Command(command) as launcher:
        await_checkpoint(folder / "interrupted", lambda: launcher.poll() is None)
        tasks = slurm_cluster.tasks_of(job_of(folder / "interrupted"))
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert re.match(r"error: job \d+ is cancelled; the newest checkpoint is \S+step-\d+, --resume goes on", err)
    assert len(tasks) == 2
    assert living(tasks.values()) == []


def test_what_sbatch_refuses_is_passed_on(cluster, folder, capfd):
    """An unknown partition ends with sbatch's own words, and nothing of the run is left."""
    assert main([*SLURM, "1", *words(folder, "nowhere", "--partition", "nosuch")]) == 1
    assert "error: sbatch refused the job: invalid partition specified: nosuch" in capfd.readouterr().err
    assert not (folder / "nowhere").exists()


def test_the_script_is_printed(folder, capfd, monkeypatch):
    """--dry-run prints the script without SLURM, with the run's options quoted; without --dry-run sbatch is missed."""
    monkeypatch.setenv("PATH", str(folder))
    run = folder / "it's"
    given = words(folder, run.name, "--resume", "--dry-run")
    assert main([*SLURM, "1", *given]) == 0
    out = capfd.readouterr().out
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=bert-tiny\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n")
    assert f"    --train.out {shlex.quote(str(run))} \\\n" in out
    assert out.endswith(" \\\n    --resume\n")
    assert main([*SLURM, "1", *given[:-2]]) == 2
    assert capfd.readouterr().err.startswith("error: sbatch is not on the PATH, so no job can be handed in here; ")
    assert not run.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--tasks-per-node", "2"],
            r"makes 4 ranks, .* has 2 = 2 pipeline .*; try --nodes 1 or --tasks-per-node 1, or",
        ),
        (["--tasks-per-node", "1", "--before", "echo 'a"], r"--before \"echo 'a\" cannot be read as words: No closing"),
        (["--tasks-per-node", "1", "--before", ""], r"--before is empty"),
        (["--tasks-per-node", "1", "--env", "A"], r"--env 'A': needed: NAME=VALUE"),
        (["--tasks-per-node", "1", "--train.steps", "many"], r"--train.steps = 'many'; needed: a whole number"),
    ],
)
def test_a_mistake_is_one_message(folder, capfd, more, message):
    """What cannot be a job is refused before anything is handed in."""
    assert main(["launch", "slurm", "--nodes", "2", *words(folder, "mistaken", *more)]) == 2
    assert re.search(message, capfd.readouterr().err)
    assert not (folder / "mistaken").exists()


def test_a_wrong_number_of_tasks_names_the_right_one(folder, capfd, monkeypatch):
    """A task of a step of another size says what to type instead, before it waits for anybody."""
    step = {"STEP_ID": 0, "JOB_ID": 7, "PROCID": 0, "NODEID": 0, "LOCALID": 0, "STEP_NUM_TASKS": 3}
    lists = {"STEP_NODELIST": "n[1-2]", "STEP_TASKS_PER_NODE": "2,1", "LAUNCH_NODE_IPADDR": "127.0.0.1"}
    for name, value in (step | lists).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert main(["train", *words(folder, "wrong")]) == 2
    message = r"world size 3 is not t · d · p = 1 · 1 · 2 = 2; start 2 processes.* To start as many: srun --ntasks=2$"
    assert re.search(message, capfd.readouterr().err, flags=re.MULTILINE)
    assert not (folder / "wrong").exists()
