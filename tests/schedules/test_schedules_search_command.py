"""``chimera schedule build auto``: what it prints, what it writes, and what it says to a misuse."""

import json

import pytest

from chimera.cli.main import main
from chimera.ir.checks import check
from chimera.ir.costs import StageCosts
from chimera.ir.costs_file import write_costs
from chimera.ir.schedule_file import read_schedule

BUILD = ["schedule", "build", "auto"]
SIZES = ["--ranks", "4", "--microbatches", "8"]


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch):
    """Make no test depend on the terminal it runs in."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_says_what_was_found_and_how_good_it_is(capsys, tmp_path):
    """The page has both clocks, the bound with its reason, the gap and the memory; the file holds the schedule."""
    path = tmp_path / "best.json"
    options = ["--placement", "bidirectional", "--memory-limit", "4", "--out", str(path)]
    assert main([*BUILD, *SIZES, *options]) == 0
    assert capsys.readouterr() == (
        (
            "auto, 4 ranks, 8 micro-batches, 4 stages, 2 routes: proved\n"
            "  makespan     25\n"
            "  span         25\n"
            "  bubble       4.00% of total, 4.17% of ideal\n"
            "  lower bound  25 (makespan): rank 1 cannot start before 1 and has computations of 24\n"
            "  gap          none: no order has a shorter makespan\n"
            "  activations  4 … 4 at most per rank (limit 4)\n"
            "  backwards    8 whole, 24 split\n"
            "  found by     list scheduling, after 1 rule\n"
            "\n"
            "Times and activations in units of 1/p of the model for one micro-batch.\n"
        ),
        f"wrote {path}\n",
    )
    schedule, _ = read_schedule(path)
    check(schedule, memory_limit=4)
    assert main(["schedule", "check", str(path), "--memory-limit", "4", "--lowered"]) == 0


def test_takes_the_placement_of_a_file(capsys, tmp_path):
    """A file gives routes and micro-batches, and its own order is one that the answer is not worse than."""
    path = tmp_path / "own.json"
    assert main(["schedule", "export", "chimera", *SIZES, "--out", str(path)]) == 0
    assert main([*BUILD, "--placement", str(path), "--json", "--effort", "0", "--memory-limit", "4"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert (same["ranks"], same["microbatches"], same["makespan"], same["lower_bound"]) == (4, 8, 25, 25)
    assert main([*BUILD, "--placement", str(path), "--microbatches", "12", "--json", "--effort", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["microbatches"] == 12
    assert main([*BUILD, "--placement", str(path), "--ranks", "8"]) == 2
    assert "has 4 ranks, got --ranks 8" in capsys.readouterr().err


def test_takes_costs_and_bytes(capsys, tmp_path):
    """A costs file has uneven stages and bytes; the limit in bytes holds, weights included."""
    path = tmp_path / "costs.json"
    costs = StageCosts(
        forward_s=[0.02, 0.01, 0.01, 0.03],
        backward_s=[0.04, 0.02, 0.02, 0.06],
        activation_bytes=[2**20] * 4,
        weight_bytes=[2**20] * 4,
        reduce_s=[0.1] * 4,
    )
    write_costs(costs, path)
    options = ["--placement", "linear", "--costs", str(path), "--memory-limit", "4MiB", "--json", "--objective", "span"]
    assert main([*BUILD, *SIZES, *options]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert max(found["peak_bytes"]) == 4 * 2**20
    assert (found["unit"], found["objective"]) == ("s", "span")
    assert found["span"] >= found["lower_bound"] >= 8 * 0.09
    assert "reduce_s plays no part" in err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--placement", "vee", *SIZES, "--memory-limit", "0.5"], 3, "at least --memory-limit 1"),
        (["--placement", "vee", *SIZES, "--memory-limit", "0"], 2, "--memory-limit 0: needed"),
        (["--placement", "vee", *SIZES, "--memory-limit", "4 apples"], 2, "as in 40GiB"),
        (["--placement", "vee", *SIZES, "--memory-limit", "4GiB"], 2, "activation_bytes"),
        (["--placement", "vees", *SIZES], 2, "did you mean 'vee'"),
        (["--placement", "nowhere.json", *SIZES], 2, "there is no such file"),
        (["--placement", "linear", "--microbatches", "8"], 2, "needs --ranks"),
        (["--placement", "linear", "--ranks", "8"], 2, "needs --microbatches"),
        (["--placement", "linear", *SIZES, "--chunks", "2"], 2, "takes no --chunks"),
        (["--placement", "bidirectional", "--ranks", "5", "--microbatches", "8"], 2, "try --ranks 4 or 6"),
        (["--placement", "linear", *SIZES, "--reduce-time", "1"], 2, "orders computations, not reductions"),
        (["--placement", "linear", *SIZES, "--effort", "-1"], 2, "--effort -1"),
        (SIZES, 2, "--placement is missing"),
    ],
)
def test_refuses_with_the_reason(capsys, options, code, message):
    """Infeasible ends with 3, wrong usage with 2; both say what to give."""
    assert main([*BUILD, *options]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_builds_nothing_but_auto(capsys):
    """A published schedule's name is pointed to the command that writes it."""
    assert main(["schedule", "build", "1f1b", "--placement", "linear", *SIZES]) == 2
    assert "chimera schedule export 1f1b" in capsys.readouterr().err
