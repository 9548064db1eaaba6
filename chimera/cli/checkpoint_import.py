"""``chimera checkpoint import``: transformers' weights as the first checkpoint of a run."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from chimera.cli.overrides import Overrides, given_overrides
from chimera.cli.weight_files import bytes_of_a_file, file_progress
from chimera.train.config_file import load_config
from chimera.train.conversion import import_checkpoint

__all__ = ["checkpoint_import"]


def checkpoint_import(
    weights: Annotated[Path, Positional, arg(metavar="WEIGHTS", help_behavior_hint="")],
    config: Annotated[Path, Positional, arg(metavar="CONFIG", help_behavior_hint="")],
    overrides: Annotated[Overrides, arg(name="")],
    *,
    file_gib: float = 2.0,
) -> None:
    """Make weights in transformers' layout the checkpoint of step 0 of a run, for 'chimera train CONFIG --resume'.

    File by file, so that a model of any size needs the memory of about two of its files; the weights may then go. The
    run's folder, train.out, must be free. Without a copy, 'train.weights' has a run read them itself.

    Example:
        chimera checkpoint import gpt2 configs/gpt2-124m.toml --train.out runs/gpt2

    Args:
        weights: a folder of safetensors files, or one such file
        config: the configuration of the run
        overrides: options of the file, set otherwise; the run has to be resumed with the same
        file_gib: most GiB of one file
    """
    file_bytes = bytes_of_a_file(file_gib)
    settings = load_config(config, given_overrides(overrides))
    made = import_checkpoint(weights, settings, file_bytes=file_bytes, report=file_progress)
    print(f"wrote {made}; go on with 'chimera train' and the same options, and --resume")
