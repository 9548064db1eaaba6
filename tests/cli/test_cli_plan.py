"""``chimera plan estimate`` and ``chimera plan validate``: the page, the JSON document, the figure, the refusals."""

import json

import pytest

from chimera.cli.main import main

GPT3 = ["plan", "estimate", "--hidden", "12288", "--layers", "96", "--heads", "96", "--seq", "2048"]
SPREAD = ["--tensor", "8", "--pipeline", "8", "--global-batch", "64", "--recompute", "full"]


def test_an_estimate_as_json(capsys):
    """The document gives the step's time and the bytes of every rank, which add up."""
    assert main([*GPT3, *SPREAD, "--software", "megatron-2022", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["step_s"] == pytest.approx(made["pipeline_s"] + made["reduce_s"] + made["optimizer_s"])
    assert len(made["bytes_per_rank"]) == 8
    assert made["peak_bytes"] == max(rank["total"] for rank in made["bytes_per_rank"])
    assert made["fits"]


def test_an_estimate_as_a_page(capsys):
    """The page names the layout, the parts of the step and the memory of first, middle and last rank."""
    assert main([*GPT3, *SPREAD]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpt, 96 blocks of 12288, on 64 × NVIDIA A100 SXM4 80 GB: t = 8, p = 8, d = 1, b = 1, m = 64")
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["rank", "0", "4", "7"]


def test_what_does_not_fit_is_said(capsys):
    """A layout over the device's memory is priced all the same, with the excess and what to change on stderr."""
    assert main([*GPT3, "--json"]) == 0
    made = capsys.readouterr()
    assert not json.loads(made.out)["fits"]
    assert "does not fit" in made.err


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--global-batch", "65", "--microbatch", "2"], "try 64 or 66"),
        (["--device", "a100"], "a100-40"),
        (["--software", "megatron"], "megatron-2021"),
        (["--gpus", "12", "--data", "12"], "--gpus 8 or 16"),
        (["--schedule", "1f1c"], "1f1b"),
    ],
)
def test_wrong_options_are_refused(wrong, named, capsys):
    """Exit code 2, and what to try."""
    assert main([*GPT3, *wrong]) == 2
    assert named in capsys.readouterr().err


def test_a_validation_as_json_and_figure(tmp_path, capsys):
    """The document gives the errors of the table; the figure is written beside it."""
    figure = tmp_path / "zero-bubble.svg"
    assert main(["plan", "validate", "--table", "zero-bubble", "--json", "--out", str(figure)]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert (made["table"], made["rows"]) == ("zero-bubble", 24)
    # Nothing was fitted on it, so that leaving it out changes nothing.
    assert made["left_out"] == {name: made[name] for name in ("rows", "mean_pct", "median_pct", "max_pct")}
    assert made["mean_pct"] < 1
    assert figure.read_text(encoding="utf-8").startswith("<?xml")


def test_a_validation_as_a_page(capsys):
    """The page lists predicted, published and error of each row, then mean, median and largest error."""
    assert main(["plan", "validate", "--table", "zero-bubble-times"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("zero-bubble-times: F + I + W of a stage")
    assert any(line.startswith("all rows") for line in lines)
