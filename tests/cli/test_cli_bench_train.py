"""``chimera bench train`` times ours and transformers' steps by turns, and refuses what it cannot measure."""

import importlib
import warnings

import pytest
import torch

from chimera.cli.main import main
from chimera.errors import UsageError
from chimera.models import BertConfig, GptConfig

TINY = {"vocab_size": 60, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 16}


@pytest.fixture
def bench():
    """Import the module, which imports transformers, whose warnings are not ours."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("chimera.cli.bench_train")


@pytest.mark.parametrize("config", [GptConfig(**TINY), BertConfig(**TINY)], ids=["gpt", "bert"])
def test_both_sides_are_measured(bench, config):
    """Medians of both are there, and the ratio is theirs over ours."""
    if bench._peer is None:
        pytest.skip("transformers is not installed (dependency group 'parity')")
    row = bench.measure_model("tiny", config, samples=2, length=8, runs=2)
    assert (row.model, row.runs) == ("tiny", 2)
    assert row.ratio == pytest.approx(row.transformers_s / row.ours_s)
    assert min(row.transformers_s, row.ours_s) > 0


def test_the_comparison_needs_transformers(bench, monkeypatch):
    """Without the package the dependency group is named."""
    monkeypatch.setattr(bench, "_peer", None)
    with pytest.raises(UsageError, match="install the dependency group parity"):
        bench.measure_model("tiny", GptConfig(**TINY), samples=1, length=8, runs=1)


@pytest.mark.parametrize("arguments", ["--runs 0", "--samples 0", "--length 1", "--length 513", "--dropout 1"])
def test_numbers_out_of_range_are_refused(capsys, arguments):
    """The message names the ranges; nothing is measured."""
    assert main(["bench", "train", *arguments.split()]) == 2
    assert "--length in 2…512" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_on_a_gpu_have_a_share_of_its_peak(bench):
    """A small stack reaches something, and not more than everything."""
    row = bench.measure_blocks(torch.device("cuda", 0), runs=2, width=512, tokens=256, num_layers=2)
    assert row.tflops > 0
    assert row.utilisation is None or 0 < row.utilisation < 1
