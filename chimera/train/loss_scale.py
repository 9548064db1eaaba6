"""The dynamic loss scale of fp16 training (Micikevicius et al., Mixed Precision Training, ICLR'18, section 3.2).

Gradients below 6e-8 are zero in fp16, so the loss is multiplied by as much as does not overflow. A pure rule from one
step's outcome to the next step's scale; it knows neither gradients nor ranks, which all see the same outcome.
"""

import math
from dataclasses import dataclass

from chimera.errors import ConfigError

__all__ = ["LossScale", "LossScaleOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleOptions:
    """Options of the ``[loss_scale]`` section, for ``train.dtype`` fp16; other types need no scale.

    Attributes:
        initial: scale of the first step; it finds its own size within a few steps, which are skipped.
        growth_interval: steps in a row without an overflow after which it doubles.
    """

    initial: float = 65536.0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not 1.0 <= self.initial < math.inf:
            raise ConfigError(f"[loss_scale] initial = {self.initial!r} must be a finite number of at least 1")
        if self.growth_interval < 1:
            raise ConfigError(f"[loss_scale] growth_interval = {self.growth_interval} must be at least 1")


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale of a step.

    Attributes:
        scale: what the loss is multiplied by.
        good_steps: steps in a row without an overflow since it last changed.
    """

    scale: float = 1.0
    good_steps: int = 0

    @property
    def is_least(self) -> bool:
        """Whether it cannot be halved: what overflows unscaled is no matter of the scale."""
        return self.scale <= 1.0

    def after(self, options: LossScaleOptions, *, overflow: bool) -> "LossScale":
        """Return the next step's scale.

        It halves after an overflow, never below 1, and doubles after ``growth_interval`` good steps in a row.

        >>> scale = LossScale(8.0)
        >>> options = LossScaleOptions(growth_interval=2)
        >>> [scale := scale.after(options, overflow=overflow) for overflow in (True, False, False)]
        [LossScale(scale=4.0, good_steps=0), LossScale(scale=4.0, good_steps=1), LossScale(scale=8.0, good_steps=0)]
        """
        if overflow:
            return LossScale(max(self.scale / 2.0, 1.0))
        if self.good_steps + 1 < options.growth_interval:
            return LossScale(self.scale, self.good_steps + 1)
        return LossScale(self.scale * 2.0)
