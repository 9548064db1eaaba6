"""What a profile runs: steps of training, or the same program on the virtual device. Neither leaves a file.

Both have a pipeline to record and make a step when told to. What is recorded, and what comes of it, is
``train.profiling``'s business.
"""

import time
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from chimera.data import PretrainingData
from chimera.ir.costs import StageCosts
from chimera.runtime.ablation import ABLATIONS, Ablation
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.updates import Update
from chimera.runtime.virtual import VirtualLoss, virtual_batch, virtual_layers
from chimera.train.config import TrainConfig
from chimera.train.layout import Layout
from chimera.train.run import TrainingRun

__all__ = ["Steps", "TrainingSteps", "VirtualSteps"]


class Steps(Protocol):
    """Makes steps.

    Attributes:
        pipe: the pipeline that they go through.
    """

    pipe: Pipeline

    def make(self) -> float:
        """Make one more step with the other ranks, and return the seconds that it took this one."""

    def close(self) -> None:
        """Let go of everything."""


class TrainingSteps:
    """Steps of training: micro-batches, gradients, the optimizer.

    Args:
        config, layout, data: of the run.
        group: its ranks.
        device: of this one.
        ablate: what is left out.
        number: steps that may be made.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        data: PretrainingData,
        group: "dist.ProcessGroup | None",
        *,
        device: torch.device,
        ablate: Ablation,
        number: int,
    ) -> None:
        # No evaluation, and micro-batches of so many steps.
        config = replace(config, train=replace(config.train, steps=number, evaluation_samples=0))
        self._run = TrainingRun(
            config,
            layout,
            data,
            group,
            device=device,
            ablate=ablate,
            record_details=True,
        )
        self.pipe = self._run.pipe
        self._run.open_data(0)
        self._made = 0

    def make(self) -> float:
        """Make the next step."""
        self._made += 1
        return self._run.step(self._made).step_s

    def close(self) -> None:
        """Close the run."""
        self._run.close()


class VirtualSteps:
    """Steps in which each computation is a wait and messages and reductions have their sizes, of zeros.

    Args:
        layout: of the run.
        costs: how long computations take; the sizes of messages and gradients, nothing where they say none.
        group: the run's ranks.
        device: of this one.
        ablate: what is left out.
        bucket_bytes: of gradients that one collective sums.
        shard_optimizer: whether gradients are scattered and weights gathered.
        timeout_s: how long a rank waits for another.
    """

    def __init__(
        self,
        layout: Layout,
        costs: StageCosts,
        group: "dist.ProcessGroup | None",
        *,
        device: torch.device,
        ablate: Ablation,
        bucket_bytes: int,
        shard_optimizer: bool,
        timeout_s: float,
    ) -> None:
        # Waits need no threads, and those of ranks that share cores would get into each other's way.
        torch.set_num_threads(1)
        schedule = layout.schedule
        checked = not ABLATIONS[ablate][0]
        layers = virtual_layers(
            costs.resolve(schedule),
            schedule.num_microbatches,
            gradient_bytes=[round(size) for size in costs.gradient_bytes or [0] * costs.num_stages],
            checked=checked,
        )
        self.pipe = Pipeline(
            layers,
            schedule,
            VirtualLoss(len(layers), checked=checked),
            group,
            device=device,
            update=_no_update if schedule.is_asynchronous else None,
            ablate=ablate,
            bucket_bytes=bucket_bytes,
            shard_optimizer=shard_optimizer,
            record_details=True,
            timeout_s=timeout_s,
        )
        largest = max(costs.message_bytes or [0.0], default=0.0) * schedule.microbatch_share
        self._batch = virtual_batch(schedule.num_microbatches, round(largest))

    def make(self) -> float:
        """Make a step, all ranks together: a late start of one would pass for a bubble."""
        self.pipe.groups.sum_everywhere(torch.zeros(1))
        begin = time.perf_counter()
        self.pipe.step(*self._batch)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Close the pipeline."""
        self.pipe.close()


def _no_update(_: Update) -> None:
    """Leave the weights as they are: they are waits."""
