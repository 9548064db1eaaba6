"""Which trackers a run has, by ``[metrics]``."""

from pathlib import Path

from chimera.train.config import MetricsOptions
from chimera.train.tracking.json_lines import JsonLines
from chimera.train.tracking.mlflow import MlFlow
from chimera.train.tracking.tensorboard import TensorBoard
from chimera.train.tracking.tracker import Tracker
from chimera.train.tracking.wandb import WeightsAndBiases

__all__ = ["trackers_of"]


def trackers_of(options: MetricsOptions, folder: Path) -> list[Tracker]:
    """Return the trackers of a run in ``folder``, none of them open."""
    trackers: list[Tracker] = [JsonLines(folder)]
    if options.tensorboard:
        trackers.append(TensorBoard(folder))
    if options.wandb:
        trackers.append(WeightsAndBiases(folder, options.project))
    if options.mlflow:
        trackers.append(MlFlow(folder, options.project))
    return trackers
