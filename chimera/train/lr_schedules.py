"""The learning rate over the steps of a run, as a factor of its peak.

A pure function of the step: nothing is stored, so nothing has to be resumed. Knows neither the peak, which is the
optimizer's option, nor the optimizer.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from chimera.errors import ConfigError, nearest_names

__all__ = ["Decay", "LearningRate", "learning_rate_factor"]

Decay = Literal["linear", "constant", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Options of the ``[learning_rate]`` section.

    Attributes:
        total_steps: Steps until the decay ends, warm-up included.
        warmup_steps: Steps over which the rate rises linearly; the last of them is the first at the peak.
        decay: Shape of the fall from the peak to the final rate: linear or cosine from the warm-up on, constant for
            none, or wsd (warm-up, stable, decay): at the peak until ``decay_steps`` before the end, then linear.
        decay_steps: Steps of the fall of wsd; None means a tenth of total_steps.
        final_fraction: The rate from ``total_steps`` on, as a fraction of the peak. None means 0, and 1 for
            ``constant``, which takes no other value.

    Raises:
        ConfigError: A value out of range or a contradiction; the message names the option.
    """

    total_steps: int
    warmup_steps: int = 0
    decay: Decay = "linear"
    decay_steps: int | None = None
    final_fraction: float | None = None

    def __post_init__(self) -> None:
        decays = get_args(Decay)
        if self.decay not in decays:
            raise ConfigError(
                f"[learning_rate] decay = {self.decay!r} is unknown{nearest_names(self.decay, decays)}; "
                f"choose one of {', '.join(decays)}"
            )
        for option in ("total_steps", "warmup_steps"):
            value = getattr(self, option)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"[learning_rate] {option} = {value!r} must be a whole number of at least 0")
        if self.warmup_steps > self.total_steps:
            raise ConfigError(
                f"[learning_rate] warmup_steps = {self.warmup_steps} exceeds total_steps = {self.total_steps}; "
                f"set warmup_steps to at most {self.total_steps}"
            )
        self._check_decay_steps()
        if self.final_fraction is None:
            return
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ConfigError(f"[learning_rate] final_fraction = {self.final_fraction!r} must be a number in [0, 1]")
        if self.decay == "constant" and self.final_fraction != 1.0:
            raise ConfigError(
                f'[learning_rate] final_fraction = {self.final_fraction!r} contradicts decay = "constant", which stays '
                "at the peak; leave final_fraction out or choose linear, cosine or wsd"
            )

    def _check_decay_steps(self) -> None:
        if self.decay_steps is None:
            return
        if self.decay != "wsd":
            raise ConfigError(
                f"[learning_rate] decay_steps = {self.decay_steps} has no meaning for decay = {self.decay!r}; leave it "
                'out or choose decay = "wsd"'
            )
        longest = self.total_steps - self.warmup_steps
        if not 0 <= self.decay_steps <= longest:
            raise ConfigError(
                f"[learning_rate] decay_steps = {self.decay_steps} must be in 0…{longest}, what warmup_steps = "
                f"{self.warmup_steps} leaves of total_steps = {self.total_steps}"
            )

    @property
    def decay_start(self) -> int:
        """The step from which the rate falls."""
        if self.decay != "wsd":
            return self.warmup_steps
        steps = self.total_steps // 10 if self.decay_steps is None else self.decay_steps
        return max(self.warmup_steps, self.total_steps - steps)


def learning_rate_factor(config: LearningRate, step: int) -> float:
    """Return what to multiply the peak learning rate by at ``step``, counted from 0.

    It rises as (step + 1) / warmup_steps, so that no step is wasted on a rate of 0, is 1 from ``step = warmup_steps``
    until ``decay_start``, and has the final value at ``total_steps`` and ever after.

    >>> schedule = LearningRate(total_steps=6, warmup_steps=2)
    >>> [learning_rate_factor(schedule, step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    final = 0.0 if config.final_fraction is None else config.final_fraction
    if step >= config.total_steps:
        return final
    if step < config.decay_start:
        return 1.0
    progress = (step - config.decay_start) / (config.total_steps - config.decay_start)
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1.0 - progress
    return final + (1.0 - final) * remaining
