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
        (["--gpus", "0"], "--gpus 0: needed"),
        (
            ["--gpus", "12", "--tensor", "8"],
            "--gpus 12 is no multiple of --tensor × --pipeline = 8; try --gpus 8 or 16",
        ),
        (["--tensor", "5"], "--tensor 5 does not divide the model's 96 attention heads; try --tensor 4 or 6"),
        (["--encoder-layers", "-1"], "--encoder-layers -1: only t5 has an encoder"),
        (["--layers", "1000000000"], "--layers 1000000000: needed: at most 10,000"),
        (["--microbatch", "10000000000"], "--microbatch 10000000000: needed: at most 1,000,000,000"),
        (["--network", "nan"], "--network nan: needed"),
        (["--pipeline", "2", "--cut", "90", "5"], "the cut has 2 stages and 95 blocks; needed: 2 and 96"),
    ],
)
def test_wrong_options_are_refused(wrong, named, capsys):
    """Exit code 2, and what to try."""
    assert main([*GPT3, *wrong]) == 2
    assert named in capsys.readouterr().err


def test_more_stages_than_blocks_are_refused_before_they_are_built(capsys):
    """A hundred thousand ranks of a million micro-batches are answered at once, as infeasible."""
    argv = ["--pipeline", "100000", "--gpus", "100000", "--global-batch", "1000000", "--nodes-of", "1"]
    assert main([*GPT3, *argv]) == 3
    assert "100000 stages for 96 blocks" in capsys.readouterr().err


def test_an_estimate_takes_any_layout(capsys):
    """Waves, units and cuts are options too; a cut given as it would be found changes nothing."""
    argv = ["--pipeline", "8", "--global-batch", "32", "--json"]
    steps = []
    for more in (
        ["--schedule", "chimera", "--unit", "double"],
        ["--schedule", "hanayo", "--waves", "2"],
        ["--cut", *["12"] * 8],
        [],
    ):
        assert main([*GPT3, *argv, *more]) == 0
        steps.append(json.loads(capsys.readouterr().out)["step_s"])
    assert steps[2] == steps[3]
    assert len(set(steps)) == 3


HEAD = "gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,iteration_ms\n"
ROW = "64,512,8,3072,32,30,2048,1,64,1,3566.5\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no row; needed: columns gpus"),
        (HEAD, "holds no row"),
        ("gpus,hidden\n1,2\n", "lacks global_batch"),
        (HEAD.replace("\n", ",gpus\n") + ROW.replace("\n", ",64\n"), "has gpus twice"),
        (HEAD + "\n" + ROW[:-8] + "\n", "line 3: has 10 fields; needed: 11"),
        (HEAD + ROW.replace("\n", ",9\n"), "line 2: has 12 fields"),
        (HEAD + ROW.replace("3566.5", "nan"), "line 2: iteration_ms is 'nan'; needed: a number"),
        (HEAD + ROW.replace("3566.5", "1e-320"), "line 2: iteration_ms is '1e-320'"),
        (HEAD + ROW.replace("64,512", "64.5,512"), "line 2: gpus is '64.5'; needed: a whole number"),
        (HEAD + ROW.replace(",30,", ",1000000000,"), "line 2: --layers 1000000000: needed: at most 10,000"),
        (HEAD + ROW.replace("512,8", "512,7"), "line 2: global_batch 512 is no multiple of micro_batch · dp = 448"),
        (HEAD + "24,512,8,3072,32,30,2048,3,8,1,3566.5\n", "line 2: --tensor 3 does not divide"),
        (HEAD + "12,480,8,3072,32,30,2048,1,12,1,3566.5\n", "line 2: --gpus 12 is not a whole number of nodes of 8"),
        (HEAD + "64,512,8,3072,32,30,2048,1,1,64,3566.5\n", "line 2: 64 stages for 30 blocks"),
        (HEAD + '"' + ROW, "unexpected end of data"),
        (HEAD + "9" * 200_000 + ROW, "field larger than field limit"),
    ],
)
def test_a_table_that_is_not_whole_is_refused_with_its_line(tmp_path, text, message, capsys):
    """Nothing in a file of measured runs is guessed, cut off or dropped."""
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    assert main(["plan", "validate", "--data", str(path), "--json"]) == 2
    assert message in capsys.readouterr().err


def test_a_table_in_other_clothes_is_the_same(tmp_path, capsys):
    """A byte order mark, line ends of another system, empty lines, quotes, spaces and other columns change nothing."""
    path, made = tmp_path / "runs.csv", []
    quoted = "".join('"' + line.replace(",", '", "') + '"\r\n\r\n' for line in (HEAD + ROW).split("\n")[:2])
    more = "size," + HEAD + "3.6," + ROW
    for text in (
        HEAD + ROW,
        "\ufeff" + HEAD + ROW,
        quoted.replace('", "', '","'),
        more,
        HEAD.replace(",", " , ") + ROW,
    ):
        path.write_bytes(text.encode())
        assert main(["plan", "validate", "--data", str(path), "--json"]) == 0
        made.append(json.loads(capsys.readouterr().out))
    assert all(each == made[0] for each in made)


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
