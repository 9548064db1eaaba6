"""The figures of a run on disk: their keys, what resuming keeps, what a killed run leaves."""

import json
from dataclasses import replace

import pytest
from small_records import evaluation, record_of, step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chimera.errors import FormatError
from chimera.train.metrics import EvaluationMetrics, read_evaluations, read_rows
from chimera.train.tracking.json_lines import JsonLines
from chimera.train.tracking.tensorboard import TensorBoard


def write(folder, rows, *, first_step=0, tensorboard=False):
    """Write rows as one run, or as the rest of one."""
    record = record_of(from_step=first_step)
    for tracker in [JsonLines(folder)] + [TensorBoard(folder)] * tensorboard:
        tracker.open(record)
        tracker.add(rows)
        tracker.close(record)


def test_a_row_has_exactly_these_keys(tmp_path):
    """A step's line has the ten keys that other programs read, in this order, and an evaluation's its five.

    What only some runs have comes behind them, and only there.
    """
    write(tmp_path, [step(1), evaluation(1)])
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert " ".join(line) == "step loss mlm_loss nsp_loss grad_norm lr tokens_per_s step_s bubble_fraction data_wait_s"
    assert line["loss"] == 1.5
    assert replace(step(1), grad_norm=None, loss_scale=8.0, gather_ms=2.0, gather_hidden_ms=0.0).row() == {
        **line,
        "grad_norm": None,
        "loss_scale": 8.0,
        "gather_ms": 2.0,
        "gather_hidden_ms": 0.0,
    }
    line = json.loads((tmp_path / "evaluation.jsonl").read_text())
    assert " ".join(line) == "step heldout_mlm_loss heldout_nsp_loss heldout_nsp_accuracy heldout_pairs"


def test_resuming_drops_later_rows(tmp_path):
    """Rows after the checkpoint's step go, so that every step stands once."""
    write(tmp_path, [evaluation(0), step(1), step(2), evaluation(2), step(3), evaluation(3)])
    write(tmp_path, [step(3), step(4)], first_step=2)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read_evaluations(tmp_path) == (evaluation(0), evaluation(2))


def test_a_half_written_line_is_no_row(tmp_path):
    """What a killed run wrote half is left out on reading and gone after resuming."""
    write(tmp_path, [step(1), step(2)])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert [row["step"] for row in read_rows(path)] == [1]
    write(tmp_path, [step(2)], first_step=1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("text", ['{"step": 1}\nnot json\n', "[1]\n", '{"loss": 1.0}\n', '{"step": "1"}\n'])
def test_a_foreign_line_is_named(tmp_path, text):
    """A complete line that is no row is refused with its number, not dropped."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"metrics.jsonl: line \d is no row of a run"):
        read_rows(path)


def test_a_loss_alone_is_an_evaluation(tmp_path):
    """A family that counts no right answers has its terms alone."""
    rows = (EvaluationMetrics(step=0, terms={"lm": 7.0}),)
    write(tmp_path, rows)
    assert json.loads((tmp_path / "evaluation.jsonl").read_text()) == {"step": 0, "heldout_lm_loss": 7.0}
    assert read_evaluations(tmp_path) == rows


@pytest.mark.parametrize(
    "other", ['"heldout_nsp_accuracy": 0.5', '"heldout_pairs": 3', '"perplexity": 9.0', '"heldout_x_accuracy": 0.5']
)
def test_an_evaluation_of_another_form_is_named(tmp_path, other):
    """An evaluation with a key too many or one too few is refused."""
    (tmp_path / "evaluation.jsonl").write_text(f'{{"step": 0, "heldout_mlm_loss": 7.0, {other}}}\n')
    with pytest.raises(FormatError, match=r"line 1 has the keys step, heldout_mlm_loss, \w+; needed: "):
        read_evaluations(tmp_path)


def test_no_file_is_no_rows(tmp_path):
    """A run that has not begun has no rows."""
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_tensorboard_has_the_same_figures(tmp_path):
    """Each figure is a scalar of its step, and resuming leaves every step once."""
    write(tmp_path, [step(1), step(2), step(3), evaluation(3)], tensorboard=True)
    write(tmp_path, [step(3)], first_step=2, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert "heldout/mlm_loss" in events.Tags()["scalars"]
    assert "train/bubble_fraction" in events.Tags()["scalars"]
