"""How gradients become weights: after each step by one optimizer, or within it by one per stage.

A synchronous schedule leaves the whole model's gradient, which can be measured and clipped before the optimizer steps.
An asynchronous one updates each stage by itself as soon as its gradient is there, so its updates are counted one by
one: by the learning rate too. Knows no data and no files.
"""

from typing import Protocol

import torch
from torch.optim import Optimizer

from chimera.ir.schedule import Schedule
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.updates import Update, UpdateHook
from chimera.train.lr_schedules import LearningRate, learning_rate_factor
from chimera.train.optimizers import OptimizerConfig, build_optimizer

__all__ = ["AfterStep", "Updating", "WithinStep", "updating_of"]


class Updating(Protocol):
    """What the training loop asks of either way.

    Attributes:
        optimizers: this rank's; each parameter is in one of them.
        hook: what the pipeline calls for its updates; None where it makes none.
        if_not_finite: what has become of the weights when a step turns out not to be finite.
    """

    optimizers: tuple[Optimizer, ...]
    hook: UpdateHook | None
    if_not_finite: str

    def build(self, pipe: Pipeline) -> None:
        """Make the optimizers of a pipeline's parameters."""

    def begin(self, step: int) -> float:
        """Begin the step with this number, counted from 1, and return its learning rate."""

    def norm(self) -> float:
        """Return the 2-norm of the whole model's gradient, of the latest update. A collective."""

    def finish(self, norm: float) -> None:
        """Update the weights, if that is not done yet, by the gradient of this norm."""


def updating_of(schedule: Schedule, optimizer: OptimizerConfig, rate: LearningRate) -> Updating:
    """Return the way that a schedule leaves."""
    return WithinStep(schedule, optimizer, rate) if schedule.is_asynchronous else AfterStep(optimizer, rate)


class AfterStep:
    """One optimizer, after each step of a synchronous schedule; see ``Updating``."""

    if_not_finite = "the weights were not updated"

    def __init__(self, optimizer: OptimizerConfig, rate: LearningRate) -> None:
        self._config = optimizer
        self._rate = rate
        self.hook: UpdateHook | None = None
        self.optimizers: tuple[Optimizer, ...] = ()

    def build(self, pipe: Pipeline) -> None:
        """Make one optimizer of all parameters."""
        self._pipe = pipe
        self.optimizers = (build_optimizer(self._config, pipe.optimizer_parameters()),)

    def begin(self, step: int) -> float:
        """Set the learning rate of the step."""
        return _set_rate(self.optimizers[0], self._config, self._rate, step - 1)

    def norm(self) -> float:
        """Return the gradient's norm."""
        return self._pipe.gradient_norm()

    def finish(self, norm: float) -> None:
        """Clip the gradient, and step."""
        clip = self._config.clip_norm
        if clip is not None and norm > clip:
            self._pipe.scale_gradients(clip / norm)
        self.optimizers[0].step()
        self._pipe.publish_weights()


class WithinStep:
    """One optimizer per stage, called by the updates of an asynchronous schedule; see ``Updating``."""

    if_not_finite = "its updates were made already, and are not saved"

    def __init__(self, schedule: Schedule, optimizer: OptimizerConfig, rate: LearningRate) -> None:
        self._placement = schedule.placement
        self._config = optimizer
        self._rate = rate
        self._of_stage: dict[int, Optimizer] = {}
        self._squares: dict[int, float] = {}
        self.hook: UpdateHook | None = self._update
        self.optimizers: tuple[Optimizer, ...] = ()

    def build(self, pipe: Pipeline) -> None:
        """Make one optimizer for each stage."""
        self._pipe = pipe
        pairs = pipe.optimizer_parameters()
        for stage in pipe.groups.stages:
            of_stage = [(name, p) for name, p in pairs if pipe.layer_to_stage[int(name.split(".")[0])] == stage]
            self._of_stage[stage] = build_optimizer(self._config, of_stage)
        self.optimizers = tuple(self._of_stage.values())

    def _update(self, update: Update) -> None:
        """Make one update of one stage."""
        optimizer = self._of_stage[update.stage]
        _set_rate(optimizer, self._config, self._rate, update.number)
        groups = self._pipe.groups
        # One copy of each stage enters the norm.
        if groups.data_rank == 0 and self._placement.ranks_of(update.stage)[0] == groups.pipeline_rank:
            gradients = [parameter.grad for _, parameter in update.parameters if parameter.grad is not None]
            norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients])
            self._squares[update.stage] = float(norms.square().sum())
        optimizer.step()

    def begin(self, step: int) -> float:
        """Return the learning rate of the step's last update."""
        self._squares.clear()
        return _rate_of(self._config, self._rate, step * self._pipe.updates_per_step - 1)

    def norm(self) -> float:
        """Return the norm of the gradient of the step's last update."""
        squared = torch.tensor([sum(self._squares.values())], dtype=torch.float64)
        return float(self._pipe.groups.sum_everywhere(squared).sqrt())

    def finish(self, norm: float) -> None:
        """Do nothing more: the step has made its updates."""


def _rate_of(config: OptimizerConfig, rate: LearningRate, update: int) -> float:
    """Return the learning rate of an update, counted from 0."""
    return config.learning_rate * learning_rate_factor(rate, update)


def _set_rate(optimizer: Optimizer, config: OptimizerConfig, rate: LearningRate, update: int) -> float:
    value = _rate_of(config, rate, update)
    for options in optimizer.param_groups:
        options["lr"] = value
    return value
