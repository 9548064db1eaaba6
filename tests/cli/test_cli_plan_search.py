"""``chimera plan`` and ``plan memory``: the page, the JSON document, the files, the refusals."""

import json
import tomllib
from pathlib import Path

import pytest

from chimera.cli.main import main
from chimera.ir.costs import StageCosts
from chimera.ir.costs_file import write_costs
from chimera.train.config_file import load_config
from chimera.train.layout import layout_of

CONFIGS = Path(__file__).parents[2] / "configs"
BERT = str(CONFIGS / "bert-base.toml")
QUICK = "--gpus 8 --global-batch 64 --schedules 1f1b chimera --tensor 1 --pipeline 2 4".split()  # noqa: SIM905


@pytest.fixture
def gpt(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"n_embd": 1024, "n_layer": 12, "n_head": 16, "n_positions": 1024, "vocab_size": 50257}
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return str(path)


def test_a_plan_as_a_page(gpt, capsys):
    """The page ranks the plans and says why the first is first, what limits it, what each choice is worth."""
    assert main(["plan", gpt, *QUICK, "--tokens", "1e9", "--price", "2", "--top", "3"]) == 0
    out = capsys.readouterr().out
    model, machine = "gpt, 12 blocks of 1,024, 1,024 tokens", "8 × NVIDIA A100 SXM4 80 GB in nodes of 8"
    assert out.startswith(f"{model}, on {machine}; 64 sequences")
    parts = ("The first beats the second by", "of the step is the blocks' own work", "One choice changed", "and cost")
    for words in parts:
        assert words in out


def test_a_plan_as_json(gpt, capsys):
    """The document holds the plans, fastest first, and counts every layout that is not among them."""
    assert main(["plan", gpt, *QUICK, "--json", "--tokens", "1e9", "--top", "3"]) == 0
    made = json.loads(capsys.readouterr().out)
    times = [each["step_s"] for each in made["plans"]]
    assert times == sorted(times)
    assert len(times) == 3
    assert {each["layout"]["schedule"] for each in made["plans"]} <= {"1f1b", "chimera"}
    assert all(each["peak_bytes"] < 80e9 for each in made["plans"])
    assert made["plans"][0]["days"] == pytest.approx(1e9 / made["plans"][0]["tokens_per_s"] / 86400)
    assert sum(made["rejected"].values()) > made["simulated"]


def test_the_first_plan_is_a_configuration_that_train_accepts(tmp_path, capsys):
    """--out writes the configuration the plan was asked for, with the plan's sizes in it; train's reader takes it."""
    out = tmp_path / "planned.toml"
    argv = ["--recompute", "none", "--sharded", "False", "--out", str(out), "--json"]
    assert main(["plan", BERT, *QUICK, *argv]) == 0
    layout = json.loads(capsys.readouterr().out)["plans"][0]["layout"]
    config = load_config(out)
    assert config.parallel.pipeline == layout["pipeline"]
    assert config.parallel.data == layout["data"]
    assert config.train.microbatch_size == layout["microbatch"]
    assert config.model == load_config(BERT).model
    document = tomllib.loads(out.read_text())
    if document["schedule"]["name"] == layout["schedule"]:
        assert config.schedule.microbatches == layout["microbatches"]
    else:
        assert Path(document["schedule"]["name"]).is_file()


MODELS = {
    "gpt2": {"n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": 32, "vocab_size": 100},
    "bert": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 32},
    "llama": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "n_positions": 32},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_config_of_transformers_becomes_one_that_train_accepts(tmp_path, kind, capsys):
    """--out of a plan of each family is read by train, and makes the batch that was asked for."""
    path, out = tmp_path / "config.json", tmp_path / "planned.toml"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 100, "intermediate_size": 128, **MODELS[kind]}))
    argv = ["--gpus", "4", "--global-batch", "8", "--pipeline", "2", "--schedules", "chimera", "--top", "1"]
    assert main(["plan", str(path), *argv, "--out", str(out), "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["plans"][0]["layout"]
    config = load_config(out)
    schedule = layout_of(config).schedule
    assert config.model.family == {"gpt2": "gpt"}.get(kind, kind)
    assert config.parallel.data * config.train.microbatch_size * schedule.num_microbatches == 8
    assert (config.parallel.pipeline, config.parallel.tensor or 1) == (2, layout["tensor"])


def test_heads_that_train_cannot_have_are_refused(tmp_path, capsys):
    """A Llama whose heads are wider than its width divides into is planned, but not written for train."""
    path = tmp_path / "config.json"
    sizes = {"vocab_size": 100, "intermediate_size": 128, "head_dim": 64, **MODELS["llama"]}
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    argv = ["--gpus", "2", "--global-batch", "4", "--schedules", "1f1b", "--no-refine"]
    assert main(["plan", str(path), *argv, "--out", str(tmp_path / "planned.toml")]) == 2
    assert "--out: heads of 64 in a model of 64" in capsys.readouterr().err


def test_an_uneven_cut_is_written_as_a_layout(tmp_path, capsys):
    """--out writes the cut that was planned, by count where it is equal, and train cuts the model so."""
    out = tmp_path / "planned.toml"
    argv = ["--gpus", "8", "--global-batch", "64", "--schedules", "1f1b", "--tensor", "1", "--microbatch", "8"]
    for pipeline, recompute in (("8", "full"), ("4", "none")):
        options = ["--pipeline", pipeline, "--recompute", recompute, "--no-refine", "--out", str(out), "--json"]
        assert main(["plan", BERT, *argv, *options]) == 0
        layout = json.loads(capsys.readouterr().out)["plans"][0]["layout"]
        made = layout_of(load_config(out))
        blocks = [made.layer_to_stage[1:-1].count(stage) for stage in range(int(pipeline))]
        assert blocks == (layout["cut"] or [12 // int(pipeline)] * int(pipeline))


def test_a_recorded_run_takes_the_place_of_the_model(tmp_path, capsys):
    """With the costs of the configuration's own stages, all ten times as slow, its layouts are that much slower."""
    config = load_config(BERT)
    stages = layout_of(config).schedule.num_stages
    slow, path, metrics = 10.0, tmp_path / "costs.json", tmp_path / "metrics.jsonl"
    write_costs(StageCosts(forward_s=[slow] * stages, backward_s=[2 * slow] * stages), path)
    metrics.write_text('{"step": 1, "step_s": 1000.0}\n')
    for file in (path, metrics):
        assert (
            main(["plan", BERT, "--gpus", "8", "--costs", str(file), "--schedules", "1f1b", "--no-refine", "--json"])
            == 0
        )
        made = json.loads(capsys.readouterr().out)["plans"]
        assert {each["layout"]["microbatch"] for each in made} == {config.train.microbatch_size}
        assert min(each["step_s"] for each in made) > slow
    assert main(["plan", BERT, "--gpus", "8", "--costs", str(path), "--block-times", str(path)]) == 2
    assert "needed: one of them" in capsys.readouterr().err


def test_recorded_costs_price_one_layout(tmp_path, capsys):
    """With --costs an estimate has the stages' own times; a file of other stages is refused."""
    argv = "plan estimate --hidden 1024 --layers 12 --heads 16 --seq 512 --pipeline 4 --global-batch 8 --json".split()  # noqa: SIM905
    path = tmp_path / "costs.json"
    write_costs(StageCosts(forward_s=[1.0] * 4, backward_s=[2.0] * 4), path)
    assert main([*argv, "--costs", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline_s"] == pytest.approx((8 + 4 - 1) * 3.0, rel=1e-3)
    write_costs(StageCosts(forward_s=[1.0] * 3, backward_s=[2.0] * 3), path)
    assert main([*argv, "--costs", str(path)]) == 2
    assert "times of 3 stages, the layout has 4" in capsys.readouterr().err


def test_a_plan_for_another_system(gpt, capsys):
    """--export narrows the search to the other system's schedules and prints its flags alone."""
    assert main(["plan", gpt, "--gpus", "8", "--global-batch", "64", "--pipeline", "4", "--export", "megatron"]) == 0
    assert capsys.readouterr().out.startswith("--tensor-model-parallel-size ")
    argv = ["--gpus", "8", "--global-batch", "64", "--pipeline", "4", "--export", "nanotron"]
    assert main(["plan", gpt, *argv]) == 2
    assert "nanotron is not written for gpt models" in capsys.readouterr().err


def test_the_memory_of_a_layout(gpt, tmp_path, capsys):
    """A row per rank whose parts add up, and a figure over time."""
    figure = tmp_path / "memory.png"
    argv = ["plan", "memory", gpt, "--gpus", "8", "--pipeline", "4", "--microbatch", "2"]
    assert main([*argv, "--json", "--out", str(figure)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert figure.stat().st_size > 10_000
    assert len(made["bytes_per_rank"]) == 4
    for rank in made["bytes_per_rank"]:
        assert sum(part for name, part in rank.items() if name != "total") == pytest.approx(rank["total"])
    assert main(argv) == 0
    assert "It fits:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--gpus", "12"], 2, "--gpus 12 is not a whole number of nodes of 8; try --gpus 8 or 16"),
        (["--gpus", "8", "--device", "a100-81"], 2, "no device has this name (did you mean 'a100-80'"),
        (["--gpus", "8", "--memory", "lots"], 2, "--memory lots: needed: a number of bytes with its unit"),
        (["--gpus", "8", "--price", "2"], 2, "--price needs --tokens"),
        (["--gpus", "8", "--global-batch", "6", "--data", "4"], 3, "try --global-batch 4 or 8"),
        (["--gpus", "8", "--memory", "1GiB", "--global-batch", "8"], 3, "no layout fits"),
        (["--gpus", "8", "--out", "plan.yaml"], 2, "--out plan.yaml: needed: a file ending in .toml"),
        (["--gpus", "8", "--schedules", "1f1c"], 2, "--schedules 1f1c: unknown (did you mean '1f1b'"),
    ],
)
def test_bad_input_is_answered(gpt, capsys, argv, code, message):
    """Wrong options end with 2, questions without an answer with 3, and the message says what to try."""
    assert main(["plan", gpt, *argv]) == code
    assert message in capsys.readouterr().err


def test_help_shows_the_command_and_not_its_group(capsys):
    """'plan' is a command and the first word of others; its --help is the command's own."""
    assert main(["plan", "--help"]) == 0
    assert "--global-batch" in capsys.readouterr().out
