"""``chimera profile``: what it writes and says, that other commands read it, and that it leaves a run alone."""

import json
import os
import statistics
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import two_hosts
from small_runs import Command, small_config, small_overrides

from chimera.cli.main import main
from chimera.ir.action import Kind
from chimera.ir.costs_file import read_costs
from chimera.ir.timeline import Lane
from chimera.timeline import read_timeline
from chimera.train.config_file import to_toml

CONFIG = str(Path(__file__).parents[2] / "configs" / "bert-tiny.toml")
NAME = "run_chimera_2stages_2cpus_microbs2_acc1"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Profile a small run with everything that a CPU has, once for all tests here; return folder and JSON."""
    folder = tmp_path_factory.mktemp("cli-profile")
    words = [*small_overrides(folder), "--profile.out", str(folder / "profiles"), "--profile.torch-profiler", "true"]
    with redirect_stdout(StringIO()) as said:
        assert main(["profile", CONFIG, "--steps", "3", "--ablate", "all", "--json", *words]) == 0
    return folder, json.loads(said.getvalue())


def test_a_profile_has_figures_a_trace_and_tables(made):
    """All lies in a folder named after the run; the run's own folder is not there."""
    folder, said = made
    out = folder / "profiles" / NAME
    names = {path.name for path in out.iterdir()}
    figures = {"timeline.pdf", "timeline.png", "trace.json", "timeline.json", "predicted.json"}
    tables = {"profile.txt", "profile.json", "costs.json", "schedule.json"}
    assert names == figures | tables | {f"torch_profiler_rank{rank}.json" for rank in range(2)}
    assert json.loads((out / "profile.json").read_text()) == said
    assert not (folder / "run").exists()
    assert said["training"] is False
    assert "These steps were no training" in (out / "profile.txt").read_text()


def test_every_rank_is_accounted_for(made):
    """Computing and idle time fill the step of each rank, and the slowest one computes longest."""
    _, said = made
    (pipeline,) = said["pipelines"]
    makespan = said["makespan_s"][said["median_step"]][0]
    for rank in pipeline["ranks"]:
        assert rank["busy_s"] + sum(rank["idle_s"].values()) == pytest.approx(makespan)
        assert rank["utilisation"] == pytest.approx(rank["busy_s"] / makespan)
        assert rank["peak_bytes"] > 0
    busy = [rank["busy_s"] for rank in pipeline["ranks"]]
    assert pipeline["slowest_rank"] == busy.index(max(busy))
    assert sorted(makespan for (makespan,) in said["makespan_s"])[1] == makespan


def test_each_kind_is_predicted_and_measured(made):
    """Four micro-batches: a forward and a backward of each on two stages, and two messages of each."""
    _, said = made
    kinds = {each["kind"]: each for each in said["kinds"]}
    assert {name: each["number"] for name, each in kinds.items()} == {
        "F": 8,
        "B": 8,
        "SEND_F": 4,
        "SEND_B": 4,
        "REDUCE_GRAD": 4,
    }
    for each in kinds.values():
        assert each["error"] == pytest.approx(each["predicted"] / each["measured"] - 1)


def test_what_is_left_out_is_timed_beside_the_whole(made):
    """Each kind of volume has as many steps as the whole run, and says that it is no training."""
    _, said = made
    whole = statistics.median(said["step_s"])
    assert list(said["ablated"]) == ["p2p", "allreduce", "all"]
    for found in said["ablated"].values():
        assert len(found["step_s"]) == 3
        assert found["cost_s"] == pytest.approx(whole - statistics.median(found["step_s"]))
        assert found["training"] is False


def test_recording_costs_less_than_a_hundredth_of_a_step(made):
    """Each rank records its computations, both ends of its messages, and its reductions."""
    _, said = made
    assert said["recording"]["events"] == 8 + 4 + 4 + 2
    assert 0 < said["recording"]["share"] < 0.01


def test_the_simulator_and_the_planner_read_its_costs(made, capsys):
    """The costs file predicts the step that the profile did; a plan takes its times in place of modelled ones."""
    folder, said = made
    out = folder / "profiles" / NAME
    assert main(["simulate", str(out / "schedule.json"), "--costs", str(out / "costs.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(said["predicted"]["makespan_s"])
    costs = read_costs(out / "costs.json")
    assert min(costs.activation_bytes) > 0
    assert costs.message_bytes == [2 * 16 * 16 * 4]
    config = folder / "run.toml"
    config.write_text(to_toml(small_config(folder)))
    words = ["--gpus", "2", "--no-refine", "--json", "--costs", str(out / "costs.json")]
    assert main(["plan", str(config), *words]) == 0
    assert {plan["layout"]["microbatch"] for plan in json.loads(capsys.readouterr().out)["plans"]} == {2}


def test_the_trace_and_the_timeline_are_of_the_median_step(made):
    """Both say the same, rank by rank."""
    folder, said = made
    out = folder / "profiles" / NAME
    timeline = read_timeline(out / "timeline.json")
    assert timeline.makespan == pytest.approx(said["makespan_s"][said["median_step"]][0])
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    assert len(computed) == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile.virtual", "true"], "[profile] virtual = true waits as long as costs say; set costs"),
        (["--profile.nvtx", "true"], "[profile] nvtx = true needs a CUDA device, and the ranks compute on cpu"),
        (["--profile.memory-snapshot", "true"], "[profile] memory_snapshot = true needs a CUDA device"),
        (["--steps", "2", "--profile.steps", "3"], "--steps and --profile.steps are the same option"),
        (["--steps", "-1"], "[profile] steps = -1 must be a whole number of at least 0"),
        (["--nsys-nodes", "0"], "--nsys-nodes says which nodes --nsys is for"),
        (["--out", "x.json"], "--out is an option of --calibrate"),
        (["--profile.costs", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_profiled_is_refused(tmp_path, words, message, capsys):
    """The option is named, and what to do instead."""
    assert main(["profile", CONFIG, *small_overrides(tmp_path), "--profile.out", str(tmp_path / "p"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_options_of_a_profile_need_one(tmp_path, capsys):
    """'chimera train' does not drop them in silence."""
    assert main(["train", CONFIG, *small_overrides(tmp_path), "--profile.ablate", "p2p"]) == 2
    assert "[profile] ablate is set, but steps = 0 makes no profile" in capsys.readouterr().err
    assert main(["train", CONFIG, *small_overrides(tmp_path), "--profile.steps", "1", "--resume"]) == 2
    assert "leave out --resume" in capsys.readouterr().err


def test_without_nsys_it_is_said_what_is_missing(tmp_path, monkeypatch, capsys):
    """Nothing is started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profile", CONFIG, *small_overrides(tmp_path), "--nsys"]) == 2
    assert "there is no nsys on this machine's PATH" in capsys.readouterr().err


def test_nsys_gets_the_command_as_a_list(tmp_path):
    """The command below it is the same one, word for word; what it is called is said by nsys's own placeholders."""
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$CHIMERA_NODE" "$@"\n')
    tool.chmod(0o755)
    out = str(tmp_path / "with a blank; and more")
    words = ["profile", CONFIG, *small_overrides(tmp_path), "--nsys", "--profile.out", out]
    environ = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "chimera", *words], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    node, *said = done.stdout.splitlines()
    name = "run_chimera_2stages_2gpus_microbs2_acc1"
    assert node == "0"
    assert said[:5] == ["profile", "-t", "cuda,nvtx", "-o", f"{out}/{name}/{name}_node%q{{CHIMERA_NODE}}"]
    assert said[said.index("-m") :] == ["-m", "chimera", *words]


def test_two_hosts_show_what_their_link_costs(tmp_path):
    """Over 200 Mbit/s a message of 500 kB takes 20 ms, beside computation; without volume the step is shorter."""
    if reason := two_hosts.missing():
        pytest.skip(reason)
    costs = {
        "forward_s": [0.01] * 2,
        "backward_s": [0.02] * 2,
        "message_bytes": [500_000],
        "bandwidth_bytes_per_s": 1e9,
    }
    (tmp_path / "costs.json").write_text(json.dumps({"format": "chimera-costs", "version": 1, **costs}))
    words = [*small_overrides(tmp_path), "--schedule.name", "1f1b", "--profile.costs", str(tmp_path / "costs.json")]
    words += [
        "--profile.virtual",
        "true",
        "--profile.warmup-steps",
        "1",
        "--profile.out",
        str(tmp_path),
        "--runtime.interface",
        two_hosts.NETWORK,
    ]
    command = [sys.executable, "-m", "chimera", "profile", CONFIG, "--steps", "3", "--ablate", "p2p", "--json", *words]
    environ = os.environ | {"MASTER_ADDR": two_hosts.ADDRESSES[0], "MASTER_PORT": "29533", "WORLD_SIZE": "2"}
    environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    with two_hosts.two_hosts(rate="200mbit") as hosts:
        running = [Command([*host, *command], env=environ | {"RANK": str(rank)}) for rank, host in enumerate(hosts)]
        answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    said = json.loads(answers[0][0])
    timeline = read_timeline(tmp_path / "run_1f1b_2stages_2virtual_microbs2_acc1" / "timeline.json")
    sends = [span for span in timeline.spans(0) if span.lane is Lane.SEND]
    computed = [span for span in timeline.spans(0) if span.lane is Lane.COMPUTE]
    # The bucket of the shaper lets the first 32 kB through at once.
    assert min(span.end - span.start for span in sends) > (500_000 - 2 * 32_768) * 8 / 200e6
    assert any(send.start < span.end and span.start < send.end for send in sends for span in computed)
    (channel,) = said["channels"]
    assert 0.015 < channel["message_s"] < 0.2
    # Eight messages, of which the last forward's and every backward's hold somebody up.
    assert said["ablated"]["p2p"]["cost_s"] > 0.02
    predicted = {each["kind"]: each["predicted"] for each in said["kinds"]}
    assert predicted[Kind.F.name] == pytest.approx(0.01)
    assert predicted[Kind.SEND_F.name] == pytest.approx(channel["message_s"], rel=0.01)
