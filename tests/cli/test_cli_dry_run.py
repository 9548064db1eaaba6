"""``chimera train --dry-run``: the ranks of a run and what they hold, and that nothing is started."""

import json
from pathlib import Path

import pytest

from chimera.cli.main import main

CONFIGS = Path(__file__).parents[2] / "configs"


def run(config, *words):
    return main(["train", str(CONFIGS / config), "--dry-run", *words])


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("a dry run starts nothing")

    for name in ("run_local", "run_joined", "warm_up", "check_run"):
        monkeypatch.setattr(f"chimera.cli.train.{name}", refuse)


def test_ranks_and_what_they_hold_are_set_side_by_side(capsys):
    """Eight ranks of bert-tiny: Megatron's order, Chimera's stages twice, each with half of every layer."""
    words = ["--parallel.tensor", "2", "--parallel.data", "2", "--parallel.sequence", "true"]
    assert run("bert-tiny.toml", *words) == 0
    said = capsys.readouterr().out
    assert said.startswith("model     BERT, 2 layers, hidden size 64, 246,018 parameters, fp32\n")
    assert "ranks     8 = 2 pipeline x 2 data x 2 tensor, sequence divided\n" in said
    assert (
        "rank  tensor  data  pipeline  shares layers with  replicas  pipeline ranks  embeddings\n"
        "0          0     0         0                 0 1  0-6 by 2             0 4    0-6 by 2\n"
        "1          1     0         0                 0 1  1-7 by 2             1 5    1-7 by 2\n"
        "2          0     1         0                 2 3  0-6 by 2             2 6    0-6 by 2\n"
    ) in said
    assert (
        "pipeline  stages  layers  parameters  weights  gradients  optimizer  activations  together\n"
        "0            0 1     0-3     129,858      0.5        0.5        1.0          1.9       3.9\n"
    ) in said
    assert "The heaviest places are 0 1, with 3.9 MiB on each rank.\n" in said
    assert said.endswith("Nothing was started (--dry-run).\n")


def test_the_published_layout_on_32_workers_has_the_papers_parameters(capsys):
    """bert-48 on 4 x 8 ranks: two copies of 669,790,012 parameters over the four places of the pipeline."""
    assert run("bert-48.toml", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["world_size"], said["tensor"], said["data"], said["pipeline"]) == (32, 1, 8, 4)
    assert len(said["ranks"]) == 32
    places = said["places"]
    assert sum(place["parameters"] for place in places) == 2 * 669_790_012
    for place in places:
        kept = place["bytes"]
        assert kept["total"] == kept["parameters"] + kept["gradients"] + kept["optimizer"] + kept["activations"]
        assert kept["parameters"] == 4 * place["parameters"]
        assert kept["optimizer"] == 8 * place["parameters"]
    assert said["ranks"][9]["pipeline_group"] == [1, 9, 17, 25]
    heaviest = max(place["bytes"]["total"] for place in places)
    assert places[said["heaviest_place"]]["bytes"]["total"] == heaviest


def test_of_many_ranks_those_of_the_first_replica_are_shown(capsys):
    """Replicas stand next to each other, so one of them says where all are."""
    assert run("bert-48.toml", "--parallel.data", "32") == 0
    said = capsys.readouterr().out
    assert "Of 128 ranks those of the first data-parallel replica are shown; each further" in " ".join(said.split())
    assert len([line for line in said.splitlines() if line[:1].isdigit()]) == 4 + 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallel.tensor", "3"], "num_heads = 2 does not divide over [parallel] tensor = 3 ranks"),
        (["--parallel.sequence", "true"], "sequence = true has no meaning for tensor = 1"),
        (
            ["--parallel.tensor", "2", "--parallel.sequence", "true", "--data.sequence-length", "31"],
            "= 31 does not divide",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(capsys, words, message):
    """With the option that is wrong, before anything is built."""
    assert run("bert-tiny.toml", *words) == 2
    assert message in capsys.readouterr().err


def test_json_needs_a_dry_run(capsys):
    """A run itself has no JSON to print."""
    assert main(["train", str(CONFIGS / "bert-tiny.toml"), "--json"]) == 2
    assert "add --dry-run" in capsys.readouterr().err
