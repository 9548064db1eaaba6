"""The small configurations of the other families learn from the bundled corpus what frequencies alone do not say."""

import math
from pathlib import Path

import pytest

from chimera.cli.training import run_local
from chimera.train.config_file import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def train(folder, name, steps):
    """Train the first steps of a configuration, on half of its batch; return its result."""
    overrides = {
        "schedule.microbatches": "2",
        "train.out": str(folder / name),
        "train.steps": str(steps),
        "learning_rate.total_steps": "400",
        "train.evaluation_interval": str(steps),
        "train.evaluation_samples": "128",
        "train.checkpoint_interval": str(steps),
        "metrics.tensorboard": "false",
        "runtime.device": "cpu",
    }
    return run_local(load_config(CONFIGS / f"{name}.toml", overrides))


@pytest.mark.parametrize(
    ("name", "steps", "start"), [("gpt-tiny", 40, math.log(2048)), ("t5-tiny", 30, None)], ids=["gpt", "t5"]
)
def test_the_loss_of_words_falls_below_the_unigram_entropy(tmp_path, name, steps, start):
    """A fraction of the steps is enough; a model that has learned nothing starts at ln V."""
    result = train(tmp_path, name, steps)
    before, after = (evaluation.terms["lm"] for evaluation in (result.evaluations[0], result.evaluations[-1]))
    if start is not None:
        assert before == pytest.approx(start, rel=0.02)
    assert after < result.unigram_entropy < before


def test_blocks_are_found_better_than_by_chance(tmp_path):
    """The right one of a micro-batch's eight blocks is found more often than one time in eight, the loss below ln 8."""
    result = train(tmp_path, "ict-tiny", 80)
    before, after = result.evaluations[0], result.evaluations[-1]
    assert before.terms["retrieval"] == pytest.approx(math.log(8), rel=0.02)
    assert after.terms["retrieval"] < math.log(8) - 0.1
    assert after.accuracy > 1.4 / 8
