"""``chimera bench runtime`` measures ours and torch's in turn and prints one table or one JSON document."""

import json

import pytest

from chimera.cli.main import main
from chimera.ir.costs import Costs
from chimera.schedules import build_schedule
from chimera.simulate import simulate


def test_it_prints_ideal_measured_and_cpu_time_of_both(capfd):
    """Each row has its ideal, which no measured step beats, and its CPU time; torch's rows bear its name."""
    arguments = "bench runtime 1f1b --ranks 2 --microbatches 2 --forward-ms 4 --backward-ms 8 --message-bytes 1024"
    assert main([*arguments.split(), "--runs", "1", "--against", "torch", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert [row["name"] for row in rows] == ["1f1b", "torch 1f1b"]
    for row in rows:
        assert row["ideal_s"] == pytest.approx(0.036)
        assert row["step_s"] >= row["ideal_s"]
        assert row["ratio"] == pytest.approx(row["step_s"] / row["ideal_s"])
        assert len(row["runs_s"]) == 1
        # Two ranks: a pair is four actions.
        assert row["cpu_us_per_pair"] == pytest.approx(4 * row["cpu_us_per_action"])
        assert row["cpu_us_per_action"] > 0


def test_overlapped_pairs_have_a_row_of_their_own(capfd):
    """A schedule with pairs runs with a forward before each backward, then together; each row has its own ideal."""
    arguments = "bench runtime dualpipev --ranks 2 --microbatches 4 --forward-ms 2 --backward-ms 4 --message-bytes 64"
    assert main([*arguments.split(), "--runs", "1", "--overlap-ms", "12", "--json"]) == 0
    apart, together = json.loads(capfd.readouterr().out)
    assert (apart["name"], together["name"]) == ("dualpipev", "dualpipev, pairs together")
    schedule = build_schedule("dualpipev", ranks=2, microbatches=4)
    assert apart["ideal_s"] == pytest.approx(simulate(schedule, pairs_together=False).makespan * 2e-3)
    assert together["ideal_s"] == pytest.approx(simulate(schedule, Costs(overlap=6)).makespan * 2e-3)
    assert all(row["step_s"] >= row["ideal_s"] for row in (apart, together))


def test_a_schedule_that_torch_has_not_stands_beside_all_that_it_has(capfd):
    """The table names the best of both."""
    arguments = "bench runtime chimera --ranks 2 --microbatches 2 --forward-ms 1 --backward-ms 1 --message-bytes 64"
    assert main([*arguments.split(), "--runs", "1", "--against", "torch"]) == 0
    printed = capfd.readouterr().out
    for name in ("chimera", "torch gpipe", "torch 1f1b", "torch interleaved", "torch looped-bfs"):
        assert f"\n{name} " in printed
    assert "Best of torch here: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "bench runtime needs a schedule"),
        ("1f1b --ranks 2 --microbatches 2 --runs 0", "--runs 0: needed: at least 1"),
        ("1f1b --ranks 2 --microbatches 2 --message-bytes 2", "--message-bytes 2: needed: at least 4"),
        ("1f1b --ranks 2 --microbatches 2 --forward-ms -1", "needed: at least 0"),
        ("dualpipe --ranks 2 --microbatches 4 --overlap-ms -1", "needed: at least 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, capsys):
    """Wrong sizes end with code 2 before any process starts."""
    assert main(["bench", "runtime", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
