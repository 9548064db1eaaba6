"""The configurations that are shipped."""

from pathlib import Path

from chimera.train.config_file import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.toml"))


def test_every_configuration_loads():
    """Every file in configs/ is a whole, valid configuration, and the paper's settings are among them."""
    for path in CONFIGS:
        load_config(path)
    names = {path.stem for path in CONFIGS}
    assert names >= {"bert-tiny", "bert-base", "bert-48", "gpt2-124m", "gpt3-175b", "t5-base", "llama3-8b"}
