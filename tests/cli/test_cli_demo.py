"""``chimera demo`` leaves a folder that explains itself, and touches no other."""

import json
import math

from chimera.cli.main import main


def test_a_short_demo_leaves_everything_it_names(tmp_path, capfd):
    """Metrics, timelines, trace, costs and a summary whose figures fit each other."""
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--steps", "20"]) == 0
    printed = capfd.readouterr().out
    for name in (
        "timeline.pdf", "timeline.png", "trace.json", "loss.png", "loss.pdf", "metrics.jsonl", "costs.json",
        "summary.md", "summary.json", "1f1b/metrics.jsonl",
    ):  # fmt: skip
        assert (out / name).stat().st_size > 0, name
    found = json.loads((out / "summary.json").read_text())
    assert abs(found["heldout_mlm_before"] / math.log(found["vocabulary_size"]) - 1) < 0.03
    assert found["heldout_mlm_after"] < found["heldout_mlm_before"]
    # The same weights, text and dropout whatever the schedule.
    assert found["largest_loss_difference"] < 1e-4
    chimera, baseline = found["schedules"]["chimera"], found["schedules"]["1f1b"]
    assert chimera["predicted_s"] < baseline["predicted_s"]
    assert chimera["virtual_s"] >= 0.99 * chimera["predicted_s"]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 20
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    for text in ("What was learned", "unigram entropy", "on the virtual device", str(out)):
        assert text in printed


def test_a_folder_with_something_else_is_not_touched(tmp_path, capsys):
    """The demo replaces what an earlier demo left, and nothing else."""
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "holds something other than an earlier demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_fewer_steps_than_are_compared_are_refused(capsys):
    """The number that is needed is named."""
    assert main(["demo", "--steps", "3"]) == 2
    assert "--steps 3: needed: at least 20" in capsys.readouterr().err
