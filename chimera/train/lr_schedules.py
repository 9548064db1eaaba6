"""The learning rate over the steps of a run, as a factor of its peak.

A pure function of the step: nothing is stored, so nothing has to be resumed. Knows neither the peak, which is the
optimizer's option, nor the optimizer.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from chimera.errors import ConfigError, nearest_names

__all__ = ["Decay", "LearningRate", "learning_rate_factor"]

Decay = Literal["linear", "constant", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Options of the ``[learning_rate]`` section.

    Attributes:
        total_steps: Steps until the decay ends, warm-up included.
        warmup_steps: Steps over which the rate rises linearly; the last of them is the first at the peak.
        decay: Shape of the fall from the peak to the final rate.
        final_fraction: The rate from ``total_steps`` on, as a fraction of the peak. None means 0, and 1 for
            ``constant``, which takes no other value.

    Raises:
        ConfigError: A value out of range or a contradiction; the message names the option.
    """

    total_steps: int
    warmup_steps: int = 0
    decay: Decay = "linear"
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
        if self.final_fraction is None:
            return
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ConfigError(f"[learning_rate] final_fraction = {self.final_fraction!r} must be a number in [0, 1]")
        if self.decay == "constant" and self.final_fraction != 1.0:
            raise ConfigError(
                f'[learning_rate] final_fraction = {self.final_fraction!r} contradicts decay = "constant", which stays '
                "at the peak; leave final_fraction out or choose linear or cosine"
            )


def learning_rate_factor(config: LearningRate, step: int) -> float:
    """Return what to multiply the peak learning rate by at ``step``, counted from 0.

    It rises as (step + 1) / warmup_steps, so that no step is wasted on a rate of 0, is 1 at ``step = warmup_steps``,
    and has the final value at ``total_steps`` and ever after.

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
    progress = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    remaining = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return final + (1.0 - final) * remaining
