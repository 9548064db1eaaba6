"""What an optimizer updates on a rank: a parameter, its full-precision original, or a stretch of either.

It knows neither why a rank has only a stretch nor who has the rest.
"""

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Portion"]


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """What this rank updates of one parameter.

    Attributes:
        name: of the parameter in the whole model.
        parameter: to be updated, with the gradient attached; a vector where it is a stretch.
        shape: of the whole parameter.
        start: where a stretch begins in the flattened parameter.
        counted: whether this rank's copy enters norms over the whole model; exactly one copy of every element does.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int = 0
    counted: bool = True

    @classmethod
    def whole(cls, name: str, parameter: nn.Parameter, *, counted: bool = True) -> "Portion":
        """Make the portion that is a whole parameter."""
        return cls(name, parameter, parameter.shape, counted=counted)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this portion's part of a tensor of the whole parameter's shape."""
        return whole.reshape(-1)[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)
