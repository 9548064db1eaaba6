"""Checkpoints: whole or not there, refused by name when they do not fit, and never a program."""

import itertools
import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
from small_runs import small_config

from chimera.errors import CheckpointError
from chimera.ir.schedule import Placement
from chimera.runtime.groups import Groups
from chimera.train import checkpoint as checkpoint_module
from chimera.train.checkpoint import latest_checkpoint, load_tensors, read_checkpoint, save_checkpoint
from chimera.train.folder import check_folder, checkpoint_steps, newest_checkpoint
from chimera.train.layout import layout_of
from chimera.train.loss_scale import LossScale
from chimera.train.state import describe, require_same
from chimera.train.updating import Progress


def alone():
    """Return the groups of a process on its own."""
    return Groups.create(None, Placement(1, ((0,),)))


def save(folder, step, *, keep=10, value=None, size=8):
    """Save tensors that all hold the step's number, or ``value``."""
    number = float(step if value is None else value)
    tensors = {
        "model.0.weight": torch.full((size, 4), number),
        "optimizer.exp_avg.0.weight": torch.full((size, 4), number),
        "optimizer.step.0.weight": torch.tensor(number),
    }
    return save_checkpoint(folder, step, tensors, {"run": "test"}, alone(), keep=keep)


def test_what_was_saved_is_loaded(tmp_path):
    """Tensors of any shape come back bit for bit, by name, and so does the description."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(()), "c": torch.randn(7).bfloat16(), "d": torch.tensor([1, 2])}
    path = save_checkpoint(tmp_path, 12, tensors, {"x": [1, {"y": None}]}, alone(), keep=1)
    loaded = load_tensors(path, lambda name: name != "d")
    assert loaded.keys() == {"a", "b", "c"}
    assert all(
        torch.equal(loaded[name], tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in loaded
    )
    found = latest_checkpoint(tmp_path)
    assert (found.path, found.step, found.description) == (tmp_path / "step-00000012", 12, {"x": [1, {"y": None}]})


def test_a_checkpoint_holds_no_program(tmp_path):
    """Its files are JSON and safetensors: a length, a JSON header, and raw numbers."""
    path = save(tmp_path, 1)
    assert sorted(file.suffix for file in path.iterdir()) == [".json", ".safetensors"]
    data = next(path.glob("*.safetensors")).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["model.0.weight"]["shape"] == [8, 4]
    assert len(data) == 8 + length + (32 + 32 + 1) * 4


def test_the_newest_stay(tmp_path):
    """Saving deletes all but the newest ones."""
    for step in (5, 10, 15, 100_000_000):
        save(tmp_path, step, keep=2)
    assert list(checkpoint_steps(tmp_path)) == [15, 100_000_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-100000000"]


def test_what_a_killed_save_leaves_is_no_checkpoint(tmp_path):
    """A folder under its temporary name, or without its last file, is passed over, and the next save clears it."""
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / ".saving-step-00000002")
    (save(tmp_path, 3) / "checkpoint.json").unlink()
    assert list(checkpoint_steps(tmp_path)) == [1]
    assert latest_checkpoint(tmp_path).step == 1
    (tmp_path / ".saving-step-00000002" / "stray").write_text("of the killed save")
    assert min(path.name for path in save(tmp_path, 2).iterdir()) == "checkpoint.json"
    assert len(list((tmp_path / "step-00000002").iterdir())) == 2
    save(tmp_path, 3)
    assert list(checkpoint_steps(tmp_path)) == [1, 2, 3]


def test_a_save_that_fails_changes_nothing(tmp_path, monkeypatch):
    """When the disk is full the earlier checkpoint is as it was, and the message says so."""
    save(tmp_path, 1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "_write_synced", full)
    with pytest.raises(
        CheckpointError, match=r"rank 0 could not save .*No space left.*earlier checkpoints are as they"
    ):
        save(tmp_path, 2, keep=1)
    assert list(checkpoint_steps(tmp_path)) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert torch.equal(load_tensors(tmp_path / "step-00000001", bool)["model.0.weight"], torch.full((8, 4), 1.0))


def keep_saving(folder):
    """Save one checkpoint after the other, for as long as the process lives."""
    for step in itertools.count(1):
        save(folder, step, keep=2, size=20_000)


def start_savers(connection):
    """Fork a process that keeps saving into each folder that comes, say its number, and take leave of it."""
    torch.set_num_threads(1)
    while folder := connection.recv():
        process_id = os.fork()
        if not process_id:
            keep_saving(folder)
        connection.send(process_id)
        os.waitpid(process_id, 0)


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """Whenever a saving process is killed, the newest checkpoint is complete and no older than the last one seen."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    starter = context.Process(target=start_savers, args=(there,), daemon=True)
    starter.start()
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        here.send(folder)
        saver = here.recv()
        deadline = time.monotonic() + 30
        while newest_step(folder) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.0017 * attempt)
        before = newest_step(folder)
        os.kill(saver, signal.SIGKILL)
        found = latest_checkpoint(folder)
        tensors = load_tensors(found.path, bool)
        assert found.step >= before >= 2
        assert all(bool((tensor == found.step).all()) for tensor in tensors.values())
    here.send(None)
    starter.join()
    assert starter.exitcode == 0


def newest_step(folder):
    return max(checkpoint_steps(folder), default=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: next(path.glob("*.safetensors")).unlink(), r"is missing; the checkpoint is damaged, delete"),
        (lambda path: truncate(next(path.glob("*.safetensors"))), r"has \d+ bytes, \d+ were written; .*is damaged"),
        (
            lambda path: (path / "checkpoint.json").write_text("{"),
            r"not a chimera-checkpoint file: .*cannot be used, delete it",
        ),
        (lambda path: rewrite(path, version=1), r"this program reads version 2; the checkpoint .* cannot be used"),
        (lambda path: rewrite(path, step=None, stop=3), r"unknown key 'stop' \(did you mean 'step'"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path, damage, message):
    """A file that is missing, cut off or of another form is refused with its name and what to do."""
    path = save(tmp_path, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def rewrite(path, **changes):
    data = json.loads((path / "checkpoint.json").read_text()) | changes
    (path / "checkpoint.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def test_a_damaged_tensor_file_is_named(tmp_path):
    """A file of the right size that is no safetensors file is refused on loading."""
    path = save(tmp_path, 1)
    file = next(path.glob("*.safetensors"))
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"step-00000001 cannot be read: .*; delete it to go on from another"):
        load_tensors(path, bool)


def saved_with(folder, config):
    """Return a checkpoint of a run with this configuration, as it is read back."""
    description = describe(config, layout_of(config), Progress(1, LossScale(1.0)))
    save_checkpoint(folder, 1, {}, description, alone(), keep=1)
    return latest_checkpoint(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"train__steps": 8},
        {"train__out": "elsewhere"},
        {"train__evaluation_interval": 7},
        {"train__evaluation_samples": 4},
        {"train__checkpoint_interval": 7},
        {"train__keep_checkpoints": 7},
        {"runtime__timeout_s": 7},
        {"runtime__port": 7},
        {"metrics__tensorboard": "true"},
        {"data__cache_dir": "elsewhere"},
        {"parallel__shard_optimizer": "true", "parallel__bucket_mib": 1},
        {"schedule__name": "1f1b", "schedule__reduce": "end", "schedule__recompute": "full"},
        {"parallel__data": 2, "schedule__microbatches": 2},
        {"parallel__tensor": 2, "parallel__sequence": "true"},
        {"parallel__pipeline": 1, "schedule__name": "gpipe"},
        {"train__accumulation_runs": 2, "schedule__microbatches": 2},
    ],
)
def test_what_changes_no_step_may_change(tmp_path, change):
    """A run may be resumed with more steps, other intervals, folder or time-out, and under another layout."""
    checkpoint = saved_with(tmp_path / "saved", small_config(tmp_path))
    config = small_config(tmp_path, **change)
    require_same(checkpoint, config, layout_of(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train__seed": 1}, r"another run: train.seed was 0, is 1; set these back"),
        ({"parallel__data": 2}, r"samples of a step was 8, is 16"),
        ({"train__microbatch_size": 4}, r"train.microbatch_size was 2, is 4; samples of a step was 8, is 16"),
        ({"model__dropout": 0.2, "train__dtype": "bf16"}, r"model.dropout was 0.1, is 0.2; train.dtype was 'fp32', is"),
        ({"optimizer__betas": "[0.9, 0.98]"}, r"optimizer.betas was \[0.9, 0.999\], is \[0.9, 0.98\]"),
        ({"learning_rate__total_steps": 21}, r"learning_rate.total_steps was 20, is 21"),
        ({"model__num_layers": 4}, r"model.num_layers was 2, is 4; set these back"),
    ],
)
def test_another_run_is_refused(tmp_path, change, message):
    """A checkpoint under options that change its next step is refused, naming each with both values."""
    checkpoint = saved_with(tmp_path / "saved", small_config(tmp_path))
    config = small_config(tmp_path, **change)
    with pytest.raises(CheckpointError, match=message):
        require_same(checkpoint, config, layout_of(config))


def test_a_folder_is_used_once(tmp_path):
    """A run may begin in a fresh folder, and go on in one that has a checkpoint; anything else is refused by name."""
    config = small_config(tmp_path)
    run = tmp_path / "run"
    check_folder(config, resume=False)
    with pytest.raises(CheckpointError, match=r"run is no folder of a run, so there is nothing to resume"):
        check_folder(config, resume=True)
    run.mkdir()
    check_folder(config, resume=False)
    (run / "metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint"):
        check_folder(config, resume=True)
    save(run / "checkpoints", 1)
    check_folder(config, resume=True)
    assert newest_checkpoint(run) == run / "checkpoints" / "step-00000001"
    with pytest.raises(
        Exception, match=r"run holds a run already; go on with it by --resume, or .*--train.out"
    ) as caught:
        check_folder(config, resume=False)
    assert caught.value.exit_code == 2
