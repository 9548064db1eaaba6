"""Calibration: the planner's model fitted to timed products, and this machine as a device file."""

import json
from dataclasses import replace

import pytest
import torch

from chimera.cli.main import main
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device
from chimera.plan.kernels import product_s, rates_of
from chimera.train import calibrate as module


def test_constants_that_made_the_times_are_found_again():
    """Products timed by the model itself, with known constants, give those constants back."""
    device = read_device("a100-80")
    # Which a calibrated device has and none of the files.
    ramp = {"matrix_ramp": device.constants["matrix_efficiency"]}
    device = replace(device, constants={**device.constants, **ramp})
    true = module._with(device, matrix_efficiency=0.7, matrix_ramp=64.0)
    times = {
        dtype: {
            shape: float(product_s(rates_of(Cluster.of(true, 1), dtype, size), *map(float, shape)))
            for shape in ((4096, 4096, 1024), (8192, 8192, 8192), (16384, 4096, 256))
        }
        for dtype, size in (("fp32", 4.0), ("bf16", 2.0), ("fp16", 2.0))
    }
    start = module._with(true, matrix_efficiency=1.0, matrix_ramp=1.0)
    fitted = module._with_fitted_products(start, times, torch.device("cpu"))
    assert fitted.constants["matrix_efficiency"].value == pytest.approx(0.7, abs=0.02)
    assert fitted.constants["matrix_ramp"].value == 64.0


def test_this_machine_becomes_a_device_that_the_planner_reads(tmp_path, monkeypatch, capsys):
    """The file reads back with positive rates, and a plan can be made with it."""
    monkeypatch.setattr(module, "_SHAPES", ((64, 64, 64), (128, 128, 128)))
    path = tmp_path / "this-machine.json"
    assert main(["profile", "--calibrate", "--json", "--out", str(path)]) == 0
    made = json.loads(capsys.readouterr().out)
    device = read_device(path)
    assert device.name == made["device"] == "this-machine"
    assert all(each["measured_s"] > 0 for each in made["products"])
    assert device.links[0].devices == 2
    config = tmp_path / "config.json"
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    config.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    argv = ["--gpus", "2", "--device", str(path), "--global-batch", "4", "--no-refine", "--json"]
    assert main(["plan", str(config), *argv]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "profile needs a configuration, as in: chimera profile configs/bert-tiny.toml; or --calibrate"),
        (["--calibrate", "--ranks", "1"], "--ranks 1: needed: at least 2"),
        (["--calibrate", "--out", "machine.txt"], "needed: a file ending in .json"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(argv, message, capsys):
    """Without a question, without a second rank or with a file of another kind nothing is measured."""
    assert main(["profile", *argv]) == 2
    assert message in capsys.readouterr().err
