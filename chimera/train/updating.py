"""One update of the weights from the gradients of a step, on this rank together with all others.

Norm, overflow, clipping, learning rate, the optimizer's step and the weights' way to where they compute stand here in
the order in which they happen. What a step's gradients are, and what to do with a loss that is not finite, others know.
"""

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from chimera.runtime.pipeline import Pipeline
from chimera.train.loss_scale import LossScale, LossScaleOptions
from chimera.train.lr_schedules import LearningRate, learning_rate_factor
from chimera.train.optimizers import OptimizerConfig, build_optimizer

__all__ = ["Progress", "Update", "Updater"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What updates have come to, which the next one depends on.

    Attributes:
        updates: how many were made. Learning rate and the optimizer's own counts go by it: a step that was skipped
            for an overflow does not count, though its samples are used up.
        loss_scale: of the next step.
    """

    updates: int
    loss_scale: LossScale


@dataclass(frozen=True, slots=True)
class Update:
    """What one step came to; equal on every rank.

    Attributes:
        norm: 2-norm of the whole model's gradient, unscaled, before clipping; not finite after an overflow.
        rate: the learning rate.
        loss_scale: the scale of this step.
        made: False where an overflow had the step skipped.
    """

    norm: float
    rate: float
    loss_scale: float
    made: bool


class Updater:
    """Makes the updates of a run.

    Args:
        pipe: whose weights.
        options: of the optimizer.
        learning_rate: how the rate goes over the updates.
        loss_scale: options of the dynamic scale; None scales nothing and skips nothing.

    Attributes:
        optimizer: of this rank's portions.
        progress: what has been done.
    """

    def __init__(
        self,
        pipe: Pipeline,
        options: OptimizerConfig,
        learning_rate: LearningRate,
        loss_scale: LossScaleOptions | None = None,
    ) -> None:
        self.optimizer: Optimizer = build_optimizer(options, pipe.portions(), sums=pipe.sum_over_portions)
        self.progress = Progress(0, LossScale(1.0 if loss_scale is None else loss_scale.initial))
        self._pipe = pipe
        self._options = options
        self._learning_rate = learning_rate
        self._loss_scale = loss_scale

    @property
    def moments(self) -> tuple[str, ...]:
        """The tensors that the optimizer keeps for each parameter, by their key in its state."""
        return self._options.moments

    @property
    def scale(self) -> float:
        """What to pass to ``Pipeline.step`` as ``loss_scale``."""
        return self.progress.loss_scale.scale

    def measure(self) -> Update:
        """Return what the next update would be like, before anything is changed; a collective."""
        norm = self._pipe.gradient_norm() / self.scale
        factor = learning_rate_factor(self._learning_rate, self.progress.updates)
        overflow = self._loss_scale is not None and not math.isfinite(norm)
        return Update(norm, self._options.learning_rate * factor, self.scale, made=not overflow)

    def apply(self, update: Update) -> None:
        """Make the measured update, or skip it, on all ranks alike."""
        if update.made:
            self._scale_gradients(update)
            for group in self.optimizer.param_groups:
                group["lr"] = update.rate
            self.optimizer.step()
            self._pipe.publish_weights()
        scale = self.progress.loss_scale
        if self._loss_scale is not None:
            scale = scale.after(self._loss_scale, overflow=not update.made)
        self.progress = Progress(self.progress.updates + update.made, scale)

    def _scale_gradients(self, update: Update) -> None:
        """Take the loss scale out, and clip to the global norm, by one factor for all stages."""
        factor = 1.0 / update.loss_scale
        clip = self._options.clip_norm
        if clip is not None and update.norm > clip:
            factor *= clip / update.norm
        if factor != 1.0:
            self._pipe.scale_gradients(factor)
