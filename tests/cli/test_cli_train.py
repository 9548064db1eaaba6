"""``chimera train``: a small run from the command line, and everything that may go wrong with one."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from promises import END_AFTER_DEATH_S, END_AFTER_TIME_OUT_S
from small_runs import Command, Running, await_checkpoint, living, ranks_below, small_overrides

from chimera.cli.main import main

CHIMERA = [sys.executable, "-m", "chimera"]
CONFIG = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give one folder to all runs of this module, so that the corpus is tokenised once."""
    return tmp_path_factory.mktemp("cli-train")


def words(folder, out, *more):
    """Return the words after ``chimera`` for a small run into ``out``."""
    return ["train", CONFIG, *small_overrides(folder), "--train.out", str(folder / out), *more]


@pytest.fixture(scope="module")
def trained(folder):
    """Make a run of four steps and return what it printed."""
    with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as errors:
        assert main(words(folder, "trained")) == 0
    assert errors.getvalue() == ""
    return said.getvalue()


def rows(folder, out):
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_what_it_is(trained, folder):
    """Before the first step stand model, ranks, schedule and step; at the end held-out loss, files and checkpoint."""
    lines = trained.splitlines()
    assert re.fullmatch(r"model     BERT, 2 layers, hidden size 16, [\d,]+ parameters, fp32", lines[0])
    assert lines[1] == "ranks     2 = 2 pipeline x 1 data"
    assert lines[2] == "schedule  chimera, 4 micro-batches of 2 samples; stages Et|tL"
    assert lines[3] == "step      8 samples of 16 tokens; idle share predicted for equal stages 0.0%"
    assert lines[4] == f"run       4 steps, {folder / 'trained'}"
    assert re.fullmatch(
        r"data      [\d,]+ word pieces to train on, vocabulary 100, unigram entropy [\d.]+ nats", lines[5]
    )
    assert re.fullmatch(r"started   after [\d.]+ s on cpu", lines[6])
    assert re.fullmatch(r"step 0  held-out: MLM 4\.[\d]+, NSP 0\.[\d]+, NSP right [\d.]+%", lines[7])
    assert re.fullmatch(r"step 1  MLM 4\.\d+, NSP 0\.\d+, gradient norm \S+, [\d,]+ tokens/s, idle [\d.]+%", lines[8])
    assert sum(line.startswith("saved ") for line in lines) == 2
    assert re.match(r"held-out MLM loss 4\.\d+ at step 0, \d\.\d+ at step 4: \d\.\d+ nats (below|above)", lines[-4])
    assert re.fullmatch(r"[\d.]+% of .+ in steps that stand.*; first step after .+", lines[-3])
    assert re.fullmatch(rf"4 steps, [\d.]+ s of training; files in {folder / 'trained'}", lines[-2])
    assert lines[-1] == f"newest checkpoint {folder / 'trained' / 'checkpoints' / 'step-00000004'}"


@pytest.mark.usefixtures("trained")
def test_a_run_can_be_looked_at_afterwards(folder, capfd):
    """'chimera top' on a finished run has its state, and what every rank said last."""
    assert main(["top", str(folder / "trained"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["state"], found["step"], found["summary"]["restarts"]) == ("finished", 4, 0)
    assert [each["state"] for each in found["ranks"]] == ["finished", "finished"]
    for rank, each in enumerate(found["ranks"]):
        assert (each["status"]["rank"], each["status"]["step"]) == (rank, 4)
        assert 0 <= each["status"]["idle_share"] < 1
        assert each["status"]["memory_bytes"] > 2**20


HAND = """name: "by-hand"
routes: 0 1 1 0
microbatches: 0 0 0 0
0F0 0F1 3F0 3I0 3F1 3I1 3W0 0B0 0F2 0F3 3F2 3B2 0I1 3W1 3F3 3B3 0B2 0W1 0B3
1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2B1 1B1 1F3 2F3 2B2 1B2 2B3 1B3
"""


@pytest.mark.usefixtures("trained")
def test_a_schedule_written_by_hand_trains(folder, capfd):
    """A schedule's file by its path, an order of nobody with whole and split backwards, makes a named one's steps."""
    path = folder / "hand.txt"
    path.write_text(HAND, encoding="utf-8")
    more = ["--schedule.name", str(path), "--schedule.microbatches", "none"]
    assert main(words(folder, "hand", *more)) == 0
    said, errors = capfd.readouterr()
    assert errors == ""
    assert "schedule  by-hand, 4 micro-batches of 2 samples; stages E|t|t|L" in said
    by_hand, by_name = ([row["loss"] for row in rows(folder, out)] for out in ("hand", "trained"))
    assert len(by_hand) == 4
    assert by_hand == pytest.approx(by_name[:4], rel=1e-5)


def test_metrics_have_the_agreed_keys(trained, folder):
    """Each row has exactly the ten keys."""
    keys = "step loss mlm_loss nsp_loss grad_norm lr tokens_per_s step_s bubble_fraction data_wait_s".split()  # noqa: SIM905
    assert [list(row) for row in rows(folder, "trained")] == [keys] * 4


def test_resume_goes_on(trained, folder, capfd):
    """--resume goes on from the newest checkpoint, and its losses are those of a run without a break, bit for bit."""
    shutil.copytree(folder / "trained", folder / "resumed")
    assert main(words(folder, "resumed", "--train.steps", "6", "--resume")) == 0
    assert "from step 4" in capfd.readouterr().out
    assert main(words(folder, "unbroken", "--train.steps", "6")) == 0
    capfd.readouterr()
    for one, other in zip(rows(folder, "resumed"), rows(folder, "unbroken"), strict=True):
        assert [one[key] for key in ("step", "loss", "grad_norm")] == [
            other[key] for key in ("step", "loss", "grad_norm")
        ]


def test_nothing_left_is_said(trained, folder, capfd):
    """Resuming a run that is done says so."""
    assert main(words(folder, "trained", "--resume")) == 0
    assert "all 4 steps were done already; raise --train.steps to go on" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        (
            [],
            (
                2,
                r"trained holds a run already; go on with it by --resume, or start another .* another --train.out",
            ),
        ),
        (["--resume", "--train.seed", "5"], (1, r"belongs to another run: train.seed was 0, is 5; set these back")),
        (["--train.out", "{}/new", "--resume"], (1, r"new is no folder of a run, so there is nothing to resume")),
        (["--train.stpes", "5"], (2, r"--train.stpes[\s\S]*--train.steps N")),
        (
            ["--train.out", "{}/new", "--train.steps", "many"],
            (2, r"^error: --train.steps = 'many'; needed: a whole number$"),
        ),
        (["--train.out", "{}/new", "--data.corpus", "no.txt"], (1, r"corpus no.txt does not exist; .*set data.corpus")),
        (["--train.out", "{}/new", "--parallel.pipeline", "6"], (2, r"got 6 stages for 4 layers; .*deeper model")),
        (
            ["--train.out", "{}/new", "--parallel.pipeline", "3"],
            (2, r"try --ranks 2 or 4 \(--ranks is parallel.pipeline"),
        ),
        (["--train.out", "{}/new", "--schedule.name", "chimra"], (2, r"did you mean 'chimera' or 'chimera-zb'\?")),
        (["--train.out", "{}/new", "--runtime.device", "cuda"], (2, r"torch finds no CUDA device here")),
        (
            ["--train.out", "{}/nan", "--optimizer.learning-rate", "1e30", "--optimizer.clip-norm", "none"],
            (1, r"^error: step \d: loss nan \(mlm nan, nsp nan\), .*Try a lower --optimizer.learning-rate"),
        ),
    ],
)
def test_a_mistake_is_one_message(trained, folder, capfd, more, outcome):
    """A mistake ends with its exit code and one message on what to do; a run that never began leaves nothing."""
    code, message = outcome
    assert main(words(folder, "trained", *(word.format(folder) for word in more))) == code
    err = capfd.readouterr().err
    assert re.search(message, err, flags=re.MULTILINE), err
    assert "Traceback" not in err
    assert not (folder / "new").exists()
    assert len(rows(folder, "trained")) == 4


def test_a_missing_configuration_is_named(capfd):
    """A file that is not there is the message's first word."""
    assert main(["train", "no/such.toml"]) == 2
    assert capfd.readouterr().err.startswith(
        "error: no/such.toml does not exist; give the path of a configuration file"
    )


def test_a_port_in_use_is_named(folder, capfd):
    """A port that somebody else listens on ends the command with 1 and its option's name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert main(words(folder, "port", "--runtime.port", port)) == 1
    assert f"error: port {port} on 127.0.0.1 cannot be used" in capfd.readouterr().err
    assert not (folder / "port").exists()


LONG = ["--train.steps", "100000", "--train.checkpoint-interval", "10"]


def all_ended(process_ids, within_s):
    """Return whether every process ends in that time."""
    deadline = time.monotonic() + within_s
    while living(process_ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not living(process_ids)


def test_a_killed_rank_ends_the_run(folder, capfd):
    """When a rank is killed all are gone in ten seconds, the message says what each did, and the run can be resumed."""
    with Running(words(folder, "killed", *LONG, "--parallel.pipeline", "4"), folder / "killed") as run:
        assert len(run.ranks) == 4
        os.kill(run.ranks[2], signal.SIGKILL)
        run.end(END_AFTER_DEATH_S)
        assert run.code == 1
        err = capfd.readouterr().err
        assert re.match(r"error: rank 2 was ended by SIGKILL", err)
        assert re.search(r"what every rank was doing:(\n  rank \d: .+){4}", err)
        assert all_ended(run.ranks, 10.0)
    assert main(["top", str(folder / "killed"), "--once"]) == 0
    assert re.search(r"killed  failed, step \d+ of 100,000: rank 2 was ended by SIGKILL", capfd.readouterr().out)
    last = max(int(path.name[5:]) for path in (folder / "killed" / "checkpoints").glob("step-*"))
    more = ["--parallel.pipeline", "4", "--train.steps", str(last + 2), "--resume"]
    assert main(words(folder, "killed", *more)) == 0
    assert [row["step"] for row in rows(folder, "killed")] == list(range(1, last + 3))
    capfd.readouterr()


def test_a_stalled_rank_ends_the_run(folder, capfd):
    """When a rank stalls all are gone within the time-out and ten seconds, and the message says where it was."""
    with Running(words(folder, "stalled", *LONG, "--runtime.timeout-s", "3"), folder / "stalled") as run:
        os.kill(run.ranks[1], signal.SIGSTOP)
        run.end(3 + END_AFTER_TIME_OUT_S)
        assert run.code == 1
        err = capfd.readouterr().err
        # In a step the runtime says it, between steps (in a save, say) the launcher.
        assert re.match(r"error: (rank 0 gave up: |(summing over|gathering from) ranks 0, 1 failed: )", err)
        assert re.search(r"what every rank was doing:(\n  rank \d: .+){2}", err)
        assert all_ended(run.ranks, 10.0)


def test_an_interrupt_says_how_to_go_on(folder):
    """Control-C ends every rank, and the message names the newest checkpoint."""
    with Command([*CHIMERA, *words(folder, "interrupted", *LONG)]) as process:
        await_checkpoint(folder / "interrupted", lambda: process.poll() is None)
        ranks = ranks_below(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.match(
            r"error: interrupted after step \d+; the newest checkpoint is \S+step-\d+, --resume goes on", err
        )
        assert json.loads((folder / "interrupted" / "run.json").read_text())["summary"]["state"] == "interrupted"
        assert all_ended(ranks, 10.0)


def joined(rank, size, port):
    """Return an environment in which another launcher has started a rank."""
    values = (rank, size, rank, size, "127.0.0.1", port)
    return os.environ | {name: str(value) for name, value in zip(LAUNCHER, values, strict=True)}


@pytest.mark.long
def test_ranks_of_another_launcher_join(folder, trained):
    """Started as torchrun starts ranks, the command joins the others instead of starting any, and trains the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [Command([*CHIMERA, *words(folder, "joined")], env=joined(rank, 2, port)) for rank in range(2)]
    outputs = [process.communicate(timeout=90) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[1] == ("", "")
    assert outputs[0][0].startswith("model     BERT")
    assert [row["loss"] for row in rows(folder, "joined")] == [row["loss"] for row in rows(folder, "trained")]


def test_a_wrong_world_size_names_the_right_one(folder, monkeypatch, capfd):
    """A job of another size is refused with the factors, before anything connects."""
    for name, value in joined(0, 3, 1).items():
        monkeypatch.setenv(name, value)
    assert main(words(folder, "wrong")) == 2
    message = r"world size 3 is not t · d · p = 1 · 1 · 2 = 2; start 2 processes, or set .*one of \(1, 1, 3\)"
    assert re.search(message, capfd.readouterr().err)
    assert not (folder / "wrong").exists()
