"""``chimera launch local``: a run on processes of this host that is started again when one of them dies.

Without restarts it is ``chimera train``; both share their code.
"""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from chimera.cli.options import Flag
from chimera.cli.overrides import Overrides, given_overrides
from chimera.cli.train import train_here
from chimera.errors import UsageError
from chimera.train.config_file import load_config
from chimera.train.layout import layout_of

__all__ = ["launch_local"]


def launch_local(
    config: Annotated[Path, Positional, arg(metavar="CONFIG", help_behavior_hint="")],
    overrides: Annotated[Overrides, arg(name="")],
    *,
    restarts: Annotated[int, arg(metavar="N")] = 3,
    resume: Flag = False,
) -> None:
    """Train on processes of this host, and go on from the newest checkpoint when one of them dies or stalls.

    The number of processes is that of the configuration's ranks: --parallel.pipeline times data times tensor. Whatever
    other launchers have set in the environment is left aside.

    Example:
        chimera launch local configs/bert-tiny.toml --restarts 2 --train.checkpoint-interval 100

    Args:
        config: a configuration file, such as configs/bert-tiny.toml
        overrides: options of the file, set otherwise
        restarts: how often to start the processes again
        resume: go on from the newest checkpoint of the run in train.out
    """
    if restarts < 0:
        raise UsageError(f"--restarts {restarts}: needed: 0 or more")
    settings = load_config(config, given_overrides(overrides))
    layout_of(settings)
    train_here(settings, resume=resume, restarts=restarts)
