"""The examples: each is short, runs as it stands, and comes to what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 60


def output_of(name, *launcher):
    """Run an example by its name, behind a launcher if one is given, and return what it prints."""
    command = [sys.executable, *(launcher or ("-W", "error")), str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_short_and_run_here():
    """No example is longer than a page, and this file runs each of them."""
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
        assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8")


def test_a_schedule_by_hand_is_drawn_and_a_stuck_one_refused():
    """The good schedule has no idle time; the proof names the cycle of the bad one."""
    drawn, refused = output_of("schedule_by_hand.py").split("\nrefused: ")
    assert drawn.splitlines()[1:3] == ["rank 0  0 2 2<< 1 3 3<< 0<< 1<<", "rank 1  2 0 0<< 3 1 1<< 2<< 3<<"]
    assert drawn.endswith("makespan 12, idle 0.0%\n")
    assert "rank 0, position 0, 1F2: waits for 0F2 of rank 1 at position 1" in refused


def test_a_new_schedule_hides_messages_at_the_price_of_memory():
    """Eager 1F1B equals 1F1B without message time, is faster with it, and holds 7 micro-batches instead of 4."""
    rows = [re.split(r" {2,}", line.strip()) for line in output_of("new_schedule.py").splitlines()[1:]]
    assert [row[2] for row in rows] == ["57", "57", "64", "58.5", "71", "60"]
    assert [row[4] for row in rows] == ["4", "7"] * 3


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


# The README's script runs under torchrun in the suite.
@pytest.mark.parametrize("launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.long)], ids=["here", "torchrun"])
def test_own_layers_train_on_ranks_started_here_or_by_torchrun(launcher):
    """Both ways of starting train: after 30 steps the loss is well below that of a guess, ln of 50 characters."""
    printed = re.findall(r"^step (\d+): loss ([\d.]+)$", output_of("train_own_layers.py", *launcher), re.MULTILINE)
    assert [step for step, _ in printed] == ["1", "30"]
    first, last = (float(loss) for _, loss in printed)
    assert 4 < first < 6
    assert last < 3
