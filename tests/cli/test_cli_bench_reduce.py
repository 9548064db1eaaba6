"""``chimera bench reduce`` measures the three places of reductions in turn, and draws them."""

import json

import pytest

from chimera.cli.main import main
from chimera.schedules import build_schedule
from chimera.simulate import simulate


def test_it_measures_every_mode_and_draws_it(capfd, tmp_path):
    """Each mode has a row that no schedule alone beats, with all its runs; the figure has the measured timelines."""
    figure = tmp_path / "reductions.svg"
    sizes = "chimera --ranks 2 --microbatches 2 --forward-ms 2 --backward-ms 4 --gradient-mib 0.5 --message-bytes 64"
    assert main(["bench", "reduce", *sizes.split(), "--runs", "1", "--out", str(figure), "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert [row["mode"] for row in rows] == ["end", "eager", "eager-opt"]
    ideal = simulate(build_schedule("chimera", ranks=2, microbatches=2)).makespan * 2e-3
    for row in rows:
        assert row["over_ideal_s"] == pytest.approx(row["step_s"] - ideal)
        assert row["over_ideal_s"] > 0
        assert 0 <= row["exposed_s"] < row["step_s"]
        assert row["runs_s"] == [row["step_s"]]
    text = figure.read_text()
    assert all(f"chimera, {mode}" in text for mode in ("end", "eager", "eager-opt"))


def test_the_table_says_which_is_best(capfd):
    """Without --json there is a table, and a sentence on what was measured."""
    sizes = "chimera --ranks 2 --microbatches 2 --forward-ms 1 --backward-ms 1 --gradient-mib 0.1"
    assert main(["bench", "reduce", *sizes.split(), "--runs", "1"]) == 0
    printed = capfd.readouterr().out
    assert "\neager-opt " in printed
    printed = " ".join(printed.split())
    assert "2 ranks, 2 micro-batches, 0.1 MiB of gradients per stage; median of 1 runs. Least: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("chimera --ranks 2 --microbatches 2 --runs 0", "--runs 0: needed: at least 1"),
        ("chimera --ranks 2 --microbatches 2 --gradient-mib 0", "--gradient-mib has to be above 0"),
        ("1f1b --ranks 2 --microbatches 2", "one copy of each stage, so there is nothing to reduce"),
        ("chimera --ranks 2 --microbatches 2 --out x.doc", "names no format"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, capsys):
    """Wrong sizes end with code 2 before any process starts."""
    assert main(["bench", "reduce", *arguments.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
