"""The folder of a run: what the files in it are called, and whether a run may begin or go on there."""

import re
from pathlib import Path
from typing import Final

from chimera.errors import CheckpointError, ConfigError
from chimera.train.config import TrainConfig
from chimera.train.metrics import METRICS

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "MARKER",
    "TIMELINE",
    "check_folder",
    "checkpoint_path",
    "checkpoint_steps",
    "newest_checkpoint",
]

CHECKPOINTS: Final = "checkpoints"
CONFIG: Final = "config.toml"
TIMELINE: Final = "timeline.json"
MARKER: Final = "checkpoint.json"
"""The file that makes a folder a checkpoint."""
_CHECKPOINT: Final = re.compile(r"step-(\d{8,})")


def check_folder(config: TrainConfig, *, resume: bool, restarted: bool = False) -> None:
    """See that the run's folder is free, or, to resume, that it holds a run with a checkpoint.

    Args:
        config: of the run.
        resume: whether to go on from a checkpoint.
        restarted: whether this job began the run itself, so that it may begin again where there is none.

    Raises:
        ConfigError: there is a run already.
        CheckpointError: there is none, or it has no checkpoint.
    """
    out = Path(config.train.out)
    begun = any((out / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS))
    if begun and not resume and not restarted:
        raise ConfigError(
            f"{out} holds a run already; go on with it by --resume, or start another one with another --train.out"
        )
    if resume and not checkpoint_steps(out / CHECKPOINTS):
        what = "has no complete checkpoint" if begun else "is no folder of a run"
        raise CheckpointError(f"{out} {what}, so there is nothing to resume; start anew without --resume")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return what the checkpoint of a step is called."""
    return folder / f"step-{step:08d}"


def checkpoint_steps(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in ``folder`` by step, ascending; what a killed run left is none."""
    found = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / MARKER).is_file()
    }
    return dict(sorted(found.items()))


def newest_checkpoint(out: str | Path) -> Path | None:
    """Return the newest complete checkpoint of the run in ``out``, or None."""
    return next(reversed(checkpoint_steps(Path(out) / CHECKPOINTS).values()), None)
