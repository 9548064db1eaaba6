"""What a profile found, as values that one process can send to another, and the folder that it is written to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.runtime.ablation import Ablation
from chimera.train.config import TrainConfig
from chimera.train.layout import layout_of
from chimera.train.link_times import ChannelTime

__all__ = ["ProfileResult", "Recording", "profile_folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What recording cost.

    Attributes:
        events: spans of a step on the rank with most.
        event_s: seconds that one takes, on the rank where it takes longest.
    """

    events: int
    event_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """A profile.

    Attributes:
        name: of the run, its schedule and sizes; the name of the folder too.
        out: that folder.
        device: where the ranks computed, in words.
        virtual: whether that was the virtual device.
        schedule: lowered, as it ran.
        runs: runs through the pipeline of one step; timelines are of the last.
        timelines: [step][pipeline], in seconds.
        step_s: [step], seconds of the whole step on the first rank: data, pipeline and update.
        costs: measured, with the sizes that are known.
        predicted_from: the costs file that the prediction is made from; None for the measured costs.
        predicted: simulated from those, with the links as they were measured.
        channels: what messages take between ranks, each pair on its own.
        ablated: the steps of each kind of volume left out.
        recording: what recording cost.
    """

    name: str
    out: Path
    device: str
    virtual: bool
    schedule: Schedule
    runs: int
    timelines: tuple[tuple[Timeline, ...], ...]
    step_s: tuple[float, ...]
    costs: StageCosts
    predicted_from: str | None
    predicted: Timeline
    channels: tuple[ChannelTime, ...]
    ablated: Mapping[Ablation, tuple[float, ...]]
    recording: Recording

    @property
    def median_step(self) -> int:
        """The number of the step whose makespan is the median, of the first pipeline."""
        makespans = [pipelines[0].makespan for pipelines in self.timelines]
        return int(np.argsort(makespans, kind="stable")[len(makespans) // 2])

    @property
    def median(self) -> tuple[Timeline, ...]:
        """The timelines of that step, one per pipeline."""
        return self.timelines[self.median_step]

    @property
    def overhead(self) -> float:
        """What recording takes of a step, as a share."""
        return self.recording.events * self.recording.event_s / float(np.median(self.step_s))

    @property
    def error(self) -> float:
        """By how much the predicted makespan is off the measured one, as a share of that."""
        return self.predicted.makespan / self.median[0].makespan - 1.0


def profile_folder(config: TrainConfig, device: torch.device) -> Path:
    """Return the folder of a profile: the run, its schedule, stages, devices, micro-batch size, accumulation runs."""
    layout = layout_of(config)
    where = "virtual" if config.profile.virtual else "gpus" if device.type == "cuda" else "cpus"
    name = (
        f"{Path(config.train.out).name}_{layout.schedule.name}_{layout.schedule.num_stages}stages_"
        f"{config.world_size}{where}_microbs{config.train.microbatch_size}_acc{config.train.accumulation_runs}"
    )
    return Path(config.profile.out) / "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
