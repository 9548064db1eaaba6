"""Runs of two and four ranks from the configuration to the files: figures, resuming, layouts that must not matter."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import small_config

from chimera.cli.training import run_local
from chimera.data import BatchRamp
from chimera.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from chimera.ir.action import Kind
from chimera.ir.timeline import Lane
from chimera.timeline import read_timeline
from chimera.train.checkpoint import load_tensors, read_checkpoint
from chimera.train.config_file import load_config
from chimera.train.events import Saved, Started
from chimera.train.loss_scale import LossScale, LossScaleOptions
from chimera.train.lr_schedules import LearningRate, learning_rate_factor
from chimera.train.metrics import EvaluationMetrics, StepMetrics, read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give one folder to all runs of this module, so that the corpus is tokenised once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder):
    """Run six steps without a break; dropout is on, and checkpoints are after steps 2, 4 and 6."""
    config = small_config(folder, train__out=folder / "whole", train__steps=6, train__keep_checkpoints=3)
    events = []
    return run_local(config, on_event=events.append), events


def losses(out):
    """Return what a step's result says of the model: loss terms and norm, as written."""
    keys = ("step", "loss", "mlm_loss", "nsp_loss", "grad_norm", "lr")
    return [tuple(row[key] for key in keys) for row in read_rows(Path(out) / "metrics.jsonl")]


def tensors_of(checkpoint):
    return load_tensors(Path(checkpoint), bool)


def test_a_run_writes_its_files(folder, whole):
    """A run leaves its configuration, a row per step, evaluations, checkpoints and the last step's timeline."""
    result, _ = whole
    out = folder / "whole"
    assert result.out == out
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "config.toml",
        "evaluation.jsonl",
        "metrics.jsonl",
        "run.json",
        "status",
        "timeline.json",
    ]
    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert load_config(out / "config.toml").train.steps == 6
    for row in rows:
        assert row["loss"] == pytest.approx(row["mlm_loss"] + row["nsp_loss"])
        assert row["tokens_per_s"] == pytest.approx(8 * 16 / row["step_s"])
        assert 0 <= row["bubble_fraction"] < 1
    assert [row["lr"] for row in rows[:3]] == [0.005, 0.01, 0.01]
    assert result.last.row() == rows[-1]


def test_a_run_is_reported_as_it_goes(whole):
    """The first rank reports the start, each step, each evaluation and each checkpoint, in their order."""
    result, events = whole
    kinds = [type(event) for event in events]
    pair = [StepMetrics, StepMetrics, EvaluationMetrics, Saved]
    assert kinds == [Started, EvaluationMetrics, *pair, *pair, *pair]
    assert events[0].vocabulary_size == 100
    assert 3 < events[0].unigram_entropy == result.unigram_entropy < 4.61
    assert result.evaluations == tuple(event for event in events if isinstance(event, EvaluationMetrics))
    assert [row.step for row in result.evaluations] == [0, 2, 4, 6]
    assert {row.answers for row in result.evaluations} == {8}
    assert result.checkpoint == events[-1].path


def test_the_timeline_is_the_last_steps(folder, whole):
    """The measured timeline has every forward and backward of both stages, and is the one on disk."""
    result, _ = whole
    spans = [span for rank in range(2) for span in result.timeline.spans(rank)]
    actions = [span.action for span in spans if span.lane is Lane.COMPUTE]
    for kind in (Kind.F, Kind.B):
        found = sorted((action.stage, action.microbatch) for action in actions if action.kind is kind)
        assert found == [(stage, microbatch) for stage in range(2) for microbatch in range(4)]
    assert read_timeline(folder / "whole" / "timeline.json").makespan == result.timeline.makespan
    assert result.timeline.bubble_fraction == result.last.bubble_fraction


@pytest.mark.parametrize("step", [2, 4])
def test_resuming_gives_the_same_bits(folder, whole, step):
    """A run that was killed and resumed has the figures, weights and moments of one that was not, bit for bit."""
    result, _ = whole
    out = folder / f"resumed{step}"
    shutil.copytree(folder / "whole", out)
    for later in (number for number in (2, 4, 6) if number > step):
        shutil.rmtree(out / "checkpoints" / f"step-{later:08d}")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # what the kill left
    config = small_config(folder, train__out=out, train__steps=6, train__keep_checkpoints=3)
    resumed = run_local(config, resume=True)
    assert losses(out) == losses(folder / "whole")
    assert resumed.evaluations == result.evaluations
    one, other = tensors_of(result.checkpoint), tensors_of(resumed.checkpoint)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_finished_run_has_nothing_left(folder, whole):
    """Resuming after the last step changes nothing and says what the run came to."""
    before = {path: path.read_bytes() for path in (folder / "whole").rglob("*") if path.is_file()}
    config = small_config(folder, train__out=folder / "whole", train__steps=6, train__keep_checkpoints=3)
    result = run_local(config, resume=True)
    assert (result.last, result.timeline, result.steps) == (None, None, 6)
    assert result.evaluations == whole[0].evaluations
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoints_hold_every_parameter_once(whole):
    """Names are those of the layer list, the tied decoder has one, and each has its two moments; the count is noted."""
    tensors = tensors_of(whole[0].checkpoint)
    names = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    assert "0.word.weight" in names
    assert "3.decoder.weight" not in names
    assert {"3.decoder.bias", "1.attention.qkv.weight", "2.feed_forward_norm.bias"} <= names
    for key in ("exp_avg", "exp_avg_sq"):
        assert {
            name.removeprefix(f"optimizer.{key}.") for name in tensors if name.startswith(f"optimizer.{key}.")
        } == names
    assert len(tensors) == 3 * len(names)
    assert read_checkpoint(whole[0].checkpoint).description["progress"]["updates"] == 6


@pytest.mark.parametrize(
    "change",
    [
        {"schedule__name": "1f1b"},
        {"schedule__name": "gpipe", "schedule__recompute": "full"},
        {"train__accumulation_runs": 2, "schedule__microbatches": 2},
        {"parallel__data": 2, "schedule__microbatches": 2},
        {"parallel__pipeline": 1, "schedule__name": "gpipe"},
        # The last stage is on the first rank.
        {"schedule__name": "zb-v"},
        {"parallel__data": 2, "schedule__microbatches": 2, "parallel__shard_optimizer": "true"},
        {"parallel__shard_optimizer": "true", "parallel__bucket_mib": 0.001, "schedule__reduce": "end"},
        {"parallel__tensor": 2, "schedule__recompute": "selective"},
        {"parallel__tensor": 2, "parallel__sequence": "true", "schedule__name": "1f1b"},
    ],
    ids=lambda change: " ".join(f"{name}={value}" for name, value in change.items()),
)
def test_the_layout_does_not_change_the_run(folder, whole, change):
    """Another schedule, accumulation, replicas or a single rank train on the same samples with the same dropout."""
    out = folder / "-".join(f"{name}{value}" for name, value in change.items())
    result = run_local(small_config(folder, train__out=out, train__steps=3, **change))
    for row, expected in zip(losses(out), losses(folder / "whole"), strict=False):
        assert row == pytest.approx(expected, rel=2e-4)
    assert len(losses(out)) == 3
    expected = whole[0].evaluations[1]
    assert result.evaluations[1].terms["mlm"] == pytest.approx(expected.terms["mlm"], rel=2e-4)
    assert result.evaluations[1].accuracy == expected.accuracy


def test_bf16_keeps_weights_in_fp32(folder, whole):
    """In bf16 the losses are near those of fp32, and what is saved and resumed are the fp32 weights."""
    options = {"train__out": folder / "bf16", "train__dtype": "bf16"}
    result = run_local(small_config(folder, train__steps=2, **options))
    assert {value.dtype for name, value in tensors_of(result.checkpoint).items() if name[:6] == "model."} == {
        torch.float32
    }
    run_local(small_config(folder, train__steps=4, **options), resume=True)
    run_local(small_config(folder, train__steps=4, **options | {"train__out": folder / "bf16-whole"}))
    assert losses(folder / "bf16") == losses(folder / "bf16-whole")
    for row, expected in zip(losses(folder / "bf16"), losses(folder / "whole"), strict=False):
        assert row[1] == pytest.approx(expected[1], rel=0.02)
        assert row[1] != expected[1]


def test_fp16_finds_its_loss_scale(folder, whole):
    """A scale that overflows halves, in steps that change nothing and count for no rate; losses are near fp32's."""
    options = {"train__dtype": "fp16", "loss_scale__initial": 2.0**40, "parallel__shard_optimizer": "true"}
    out = folder / "fp16"
    result = run_local(small_config(folder, train__steps=30, train__out=out, **options))
    rows = read_rows(out / "metrics.jsonl")
    scale, updates, rates = LossScale(2.0**40), 0, {}
    for row in rows:
        assert row["loss_scale"] == scale.scale
        assert rates.setdefault(updates, row["lr"]) == row["lr"]
        overflow = row["grad_norm"] is None
        updates += not overflow
        scale = scale.after(LossScaleOptions(), overflow=overflow)
    assert all(row["grad_norm"] is None for row in rows[:10])
    assert 2 < updates < 20
    assert rates[0] < rates[1] > rates[updates - 1]
    # No sample of the first step is trained on, so its loss is the initial one.
    assert rows[0]["loss"] == pytest.approx(losses(folder / "whole")[0][1], rel=0.02)
    progress = read_checkpoint(result.checkpoint).description["progress"]
    assert progress == {"updates": updates, "loss_scale": asdict(scale)}


@pytest.mark.parametrize(
    "change",
    [
        {"parallel__data": 2, "schedule__microbatches": 2},
        {"schedule__name": "1f1b", "parallel__shard_optimizer": "false"},
        {"parallel__pipeline": 1, "schedule__name": "gpipe"},
        {"parallel__tensor": 2, "parallel__sequence": "true"},
    ],
    ids=lambda change: " ".join(f"{name}={value}" for name, value in change.items()),
)
def test_a_sharded_run_goes_on_under_another_layout(folder, whole, change):
    """What Chimera saved with sharded states is taken up by more replicas, another schedule, or one rank alone."""
    out = folder / "-".join(["moved", *change])
    shutil.copytree(sharded(folder), out)
    options = {"train__out": out, "parallel__shard_optimizer": "true"} | change
    run_local(small_config(folder, train__steps=4, **options), resume=True)
    for row, expected in zip(losses(out), losses(folder / "whole"), strict=False):
        assert row == pytest.approx(expected, rel=2e-4)
    assert len(losses(out)) == 4


def test_a_batch_grows_by_whole_runs_and_a_run_goes_on_inside_the_ramp(folder):
    """Steps of 8, 16 and 24 samples follow one another as the samples say; a stop between them changes no loss."""
    options = {"train__batch_ramp": "[8, 8, 48]", "train__accumulation_runs": 3, "train__evaluation_interval": 20}
    sizes = [BatchRamp(8, 8, 48).batch(step, 24) for step in range(8)]
    assert sizes == [8, 8, 8, 16, 16, 24, 24, 24]
    run_local(small_config(folder, train__out=folder / "ramp", train__steps=8, **options))
    rows = read_rows(folder / "ramp" / "metrics.jsonl")
    # Tokens are those of the step's own samples, 16 of each.
    assert [round(row["tokens_per_s"] * row["step_s"] / 16) for row in rows] == sizes
    run_local(small_config(folder, train__out=folder / "ramp-halves", train__steps=4, **options))
    resumed = small_config(folder, train__out=folder / "ramp-halves", train__steps=8, **options)
    run_local(resumed, resume=True)
    assert losses(folder / "ramp-halves") == losses(folder / "ramp")


def test_a_run_of_shared_layers_goes_on_alone(folder, whole):
    """What two tensor-parallel ranks saved, divided sequences and sharded states and all, one rank takes up whole."""
    out = folder / "shared"
    options = {"parallel__tensor": 2, "parallel__sequence": "true", "parallel__shard_optimizer": "true"}
    shared = run_local(small_config(folder, train__out=out, train__steps=2, **options))
    shapes = {name: tensor.shape for name, tensor in tensors_of(shared.checkpoint).items()}
    assert shapes == {name: tensor.shape for name, tensor in tensors_of(whole[0].checkpoint).items()}
    alone = {"parallel__pipeline": 1, "schedule__name": "gpipe"}
    run_local(small_config(folder, train__out=out, train__steps=4, **alone), resume=True)
    for row, expected in zip(losses(out), losses(folder / "whole"), strict=False):
        assert row == pytest.approx(expected, rel=2e-4)
    assert len(losses(out)) == 4


def sharded(folder):
    """Return the folder of a sharded run of two steps, made once."""
    out = folder / "sharded"
    if not out.exists():
        run_local(small_config(folder, train__out=out, train__steps=2, parallel__shard_optimizer="true"))
        assert [row["gather_ms"] is not None for row in read_rows(out / "metrics.jsonl")] == [True, True]
    return out


def test_clipping_is_by_the_global_norm(folder, whole):
    """SGD with the norm clipped to c moves the weights by at most lr · c; the row keeps the norm before clipping."""
    options = {
        "optimizer__name": "sgd",
        "optimizer__weight_decay": 0,
        "train__steps": 1,
        "learning_rate__warmup_steps": 0,
    }
    moved = []
    for clip in ("none", 0.1):
        out = folder / f"clip-{clip}"
        result = run_local(small_config(folder, train__out=out, optimizer__clip_norm=clip, **options))
        moved.append((result, tensors_of(result.checkpoint)))
    (free, weights), (clipped, clipped_weights) = moved
    assert free.last.grad_norm == clipped.last.grad_norm > 0.1
    distance = sum(float((weights[name] - clipped_weights[name]).double().square().sum()) for name in weights) ** 0.5
    assert distance == pytest.approx(0.01 * (free.last.grad_norm - 0.1), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"optimizer__learning_rate": "1e30", "optimizer__clip_norm": "none", "learning_rate__warmup_steps": 0},
            NonFiniteError,
            r"step 2: loss nan \(mlm nan, nsp nan\).*no checkpoint yet.*--optimizer.learning-rate .*clip-norm",
        ),
        ({"data__corpus": "no/such.txt"}, DataError, r"corpus no/such.txt does not exist"),
        ({"data__vocab_size": 3000, "model__vocab_size": 3000}, DataError, r"set data.vocab_size to \d+ or less"),
        ({"model__num_layers": 2, "parallel__pipeline": 3, "schedule__name": "1f1b"}, None, None),
    ],
)
def test_what_fails_says_why(folder, change, error, message):
    """A run that cannot go on ends with one message on what to do, and leaves nothing half-written."""
    out = folder / f"failing-{next(iter(change))}"
    config = small_config(folder, train__out=out, train__checkpoint_interval=10, train__steps=5, **change)
    if error is None:
        run_local(config)
        return
    with pytest.raises(error, match=message):
        run_local(config)
    rows = (out / "metrics.jsonl").read_text().splitlines() if out.exists() else []
    assert out.exists() == (error is NonFiniteError)
    assert [json.loads(row)["step"] for row in rows] == ([1] if rows else [])
    assert not (out / "checkpoints").exists()


def test_a_run_is_not_overwritten(folder, whole):
    """A second run into the same folder is refused before anything starts, and so is resuming another one."""
    config = small_config(folder, train__out=folder / "whole", train__steps=6)
    with pytest.raises(ConfigError, match=r"whole holds a run already; go on with it by --resume"):
        run_local(config)
    other = small_config(folder, train__out=folder / "whole", train__steps=8, train__seed=3)
    with pytest.raises(CheckpointError, match=r"train.seed was 0, is 3"):
        run_local(other, resume=True)
    assert len(losses(folder / "whole")) == 6


OWN_UPDATES = {"schedule__name": "pipedream-2bw", "optimizer__clip_norm": "none", "model__tied_decoder": "false"}


def test_one_update_per_step_is_synchronous_training(folder):
    """An asynchronous schedule with a single update trains as 1F1B does: same losses, norms, rates and weights."""
    results = {}
    for name, options in (("pipedream-2bw", {"schedule__updates": 1}), ("1f1b", {})):
        out = folder / f"single-{name}"
        results[name] = run_local(
            small_config(folder, **{**OWN_UPDATES, "schedule__name": name}, **options, train__out=out)
        )
    one, other = (losses(result.out) for result in results.values())
    np.testing.assert_allclose(one, other, rtol=1e-6)
    one, other = (tensors_of(result.checkpoint) for result in results.values())
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_an_asynchronous_run_learns_and_resumes_bit_for_bit(folder, name):
    """The learning rate counts updates, of which a step has several; a resumed run repeats what it would have made."""
    options = {**OWN_UPDATES, "schedule__name": name, "optimizer__name": "lamb", "learning_rate__total_steps": 40}
    whole = run_local(small_config(folder, **options, train__out=folder / f"whole-{name}"))
    out = folder / f"again-{name}"
    shutil.copytree(whole.out, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    again = run_local(small_config(folder, **options, train__out=out), resume=True)
    assert losses(out) == losses(whole.out)
    one, other = tensors_of(whole.checkpoint), tensors_of(again.checkpoint)
    assert all(torch.equal(one[tensor], other[tensor]) for tensor in one)
    updates = 4 if name == "pipedream" else 2
    rate = LearningRate(total_steps=40, warmup_steps=2)
    rows = read_rows(out / "metrics.jsonl")
    assert [row["lr"] for row in rows] == [
        0.01 * learning_rate_factor(rate, updates * step - 1) for step in range(1, len(rows) + 1)
    ]
    assert whole.evaluations[-1].terms["mlm"] < whole.evaluations[0].terms["mlm"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer__clip_norm": 1.0},
            r"no global gradient norm that optimizer.clip_norm = 1 could bound; set .* none",
        ),
        ({"train__accumulation_runs": 2}, r"train.accumulation_runs = 2 do not accumulate; set it to 1"),
        (
            {"model__tied_decoder": "true"},
            r"the decoder's weight too, in stages 0 and 1; set model.tied_decoder to false",
        ),
    ],
)
def test_what_updates_within_a_run_rule_out_is_refused_before_any_rank_starts(folder, options, message):
    """Clipping by a global norm, accumulation and a decoder tied to another stage are refused by name."""
    config = small_config(folder, **{**OWN_UPDATES, **options}, train__out=folder / "refused")
    with pytest.raises(ConfigError, match=message):
        run_local(config)
    assert not (folder / "refused").exists()
