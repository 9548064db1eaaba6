"""How gradients become weights: after each step by one optimizer, or within it by one per stage.

A synchronous schedule leaves the whole model's gradient, which can be measured, unscaled and clipped before the
optimizer steps, or found to have overflowed. An asynchronous one updates each stage by itself as soon as its gradient
is there, so its updates are counted one by one: by the learning rate too. Knows no data and no files.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.optim import Optimizer

from chimera.ir.schedule import Schedule
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.updates import Update, UpdateHook
from chimera.train.loss_scale import LossScale, LossScaleOptions
from chimera.train.lr_schedules import LearningRate, learning_rate_factor
from chimera.train.optimizers import OptimizerConfig, build_optimizer

__all__ = ["AfterStep", "Outcome", "Progress", "Updating", "WithinStep", "updating_of"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far updates are, which the next one depends on.

    Attributes:
        updates: how many each weight has had. Learning rate and the optimizer's own counts go by it: a step that was
            skipped for an overflow does not count, though its samples are used up.
        loss_scale: of the next step.
    """

    updates: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step comes to; equal on every rank.

    Attributes:
        norm: 2-norm of the whole model's gradient, unscaled, before clipping; of the last update where a step makes
            several; not finite after an overflow.
        rate: the learning rate, of the last update.
        loss_scale: the scale of this step.
        updates: False where an overflow has the step skipped.
    """

    norm: float
    rate: float
    loss_scale: float = 1.0
    updates: bool = True


class Updating(Protocol):
    """What the training loop asks of either way.

    Attributes:
        optimizers: this rank's; each portion is in one of them.
        moments: the tensors that they keep for each parameter, by their key in an optimizer's state.
        hook: what the pipeline calls for its updates; None where it makes none.
        if_not_finite: what has become of the weights when a step turns out not to be finite.
        progress: how far they are.
    """

    optimizers: tuple[Optimizer, ...]
    moments: tuple[str, ...]
    hook: UpdateHook | None
    if_not_finite: str
    progress: Progress

    def build(self, pipe: Pipeline) -> None:
        """Make the optimizers of a pipeline's portions."""

    def begin(self) -> float:
        """Begin a step, and return what to multiply its loss by."""

    def measure(self) -> Outcome:
        """Return what the step comes to, before anything is changed that is not changed yet. A collective."""

    def finish(self, outcome: Outcome) -> None:
        """Make the update, if that is not done yet, or skip it; on all ranks alike."""


def updating_of(
    schedule: Schedule, optimizer: OptimizerConfig, rate: LearningRate, loss_scale: LossScaleOptions | None = None
) -> Updating:
    """Return the way that a schedule leaves; ``loss_scale`` None scales nothing and skips nothing."""
    if not schedule.is_asynchronous:
        return AfterStep(optimizer, rate, loss_scale)
    assert loss_scale is None, "an overflow cannot be skipped where stages update one by one"
    return WithinStep(schedule, optimizer, rate)


class AfterStep:
    """One optimizer, after each step of a synchronous schedule; see ``Updating``."""

    if_not_finite = "the weights were not updated"

    def __init__(
        self, optimizer: OptimizerConfig, rate: LearningRate, loss_scale: LossScaleOptions | None = None
    ) -> None:
        self._config = optimizer
        self._rate = rate
        self._loss_scale = loss_scale
        self.moments = optimizer.moments
        self.hook: UpdateHook | None = None
        self.optimizers: tuple[Optimizer, ...] = ()
        self.progress = Progress(0, LossScale(1.0 if loss_scale is None else loss_scale.initial))

    def build(self, pipe: Pipeline) -> None:
        """Make one optimizer of all portions."""
        self._pipe = pipe
        self.optimizers = (build_optimizer(self._config, pipe.portions(), sums=pipe.sum_over_portions),)

    def begin(self) -> float:
        """Return the loss scale."""
        return self.progress.loss_scale.scale

    def measure(self) -> Outcome:
        """Return the gradient's norm, the rate, and whether nothing overflowed."""
        scale = self.progress.loss_scale.scale
        norm = self._pipe.gradient_norm() / scale
        overflow = self._loss_scale is not None and not math.isfinite(norm)
        return Outcome(norm, _rate_of(self._config, self._rate, self.progress.updates), scale, updates=not overflow)

    def finish(self, outcome: Outcome) -> None:
        """Unscale and clip the gradient and step, or skip the step; then set the next one's scale."""
        if outcome.updates:
            self._scale_gradients(outcome)
            _set_rate(self.optimizers[0], outcome.rate)
            self.optimizers[0].step()
            self._pipe.publish_weights()
        scale = self.progress.loss_scale
        if self._loss_scale is not None:
            scale = scale.after(self._loss_scale, overflow=not outcome.updates)
        self.progress = Progress(self.progress.updates + outcome.updates, scale)

    def _scale_gradients(self, outcome: Outcome) -> None:
        """Take the loss scale out and clip to the global norm, by one factor for all stages."""
        factor = 1.0 / outcome.loss_scale
        clip = self._config.clip_norm
        if clip is not None and outcome.norm > clip:
            factor *= clip / outcome.norm
        if factor != 1.0:
            self._pipe.scale_gradients(factor)


class WithinStep:
    """One optimizer per stage, called by the updates of an asynchronous schedule; see ``Updating``."""

    if_not_finite = "its updates were made already, and are not saved"

    def __init__(self, schedule: Schedule, optimizer: OptimizerConfig, rate: LearningRate) -> None:
        self._placement = schedule.placement
        self._config = optimizer
        self._rate = rate
        self._of_stage: dict[int, Optimizer] = {}
        self._squares: dict[int, float] = {}
        self.moments = optimizer.moments
        self.hook: UpdateHook | None = self._update
        self.optimizers: tuple[Optimizer, ...] = ()
        self.progress = Progress()

    def build(self, pipe: Pipeline) -> None:
        """Make one optimizer for each stage."""
        self._pipe = pipe
        portions = pipe.portions()
        for stage in pipe.groups.stages:
            of_stage = [
                portion for portion in portions if pipe.layer_to_stage[int(portion.name.split(".")[0])] == stage
            ]
            self._of_stage[stage] = build_optimizer(self._config, of_stage)
        self.optimizers = tuple(self._of_stage.values())

    def _update(self, update: Update) -> None:
        """Make one update of one stage."""
        optimizer = self._of_stage[update.stage]
        _set_rate(optimizer, _rate_of(self._config, self._rate, update.number))
        groups = self._pipe.groups
        # One copy of each stage enters the norm.
        if groups.data_rank == 0 and self._placement.ranks_of(update.stage)[0] == groups.pipeline_rank:
            gradients = [parameter.grad for _, parameter in update.parameters if parameter.grad is not None]
            norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients])
            self._squares[update.stage] = float(norms.square().sum())
        optimizer.step()

    def begin(self) -> float:
        """Return 1: the loss is as it is."""
        self._squares.clear()
        return 1.0

    def measure(self) -> Outcome:
        """Return the norm of the gradient of the step's last update, and its rate."""
        squared = torch.tensor([sum(self._squares.values())], dtype=torch.float64)
        norm = float(self._pipe.groups.sum_everywhere(squared).sqrt())
        last = self.progress.updates + self._pipe.updates_per_step - 1
        return Outcome(norm, _rate_of(self._config, self._rate, last))

    def finish(self, outcome: Outcome) -> None:
        """Count the updates, which the step has made."""
        del outcome
        self.progress = Progress(self.progress.updates + self._pipe.updates_per_step)


def _rate_of(config: OptimizerConfig, rate: LearningRate, update: int) -> float:
    """Return the learning rate of an update, counted from 0."""
    return config.learning_rate * learning_rate_factor(rate, update)


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for options in optimizer.param_groups:
        options["lr"] = rate
