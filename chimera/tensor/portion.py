"""What an optimizer updates on a rank: a parameter, its full-precision original, or a stretch of either.

It knows neither why a rank has only a stretch nor who has the rest.
"""

from dataclasses import dataclass

import torch
from torch import nn

from chimera.tensor.sharding import WHOLE, Sharding

__all__ = ["Portion"]


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """What this rank updates of one parameter.

    Attributes:
        name: of the parameter in the whole model.
        parameter: to be updated, with the gradient attached; a vector where it is a stretch.
        shape: of the whole parameter in the whole model.
        start: where a stretch begins in the flattened parameter, as this rank holds it.
        sharding: how the parameter lies over tensor-parallel ranks.
        counted: whether this rank's copy enters norms over the whole model; exactly one copy of every element does.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int = 0
    counted: bool = True
    sharding: Sharding = WHOLE

    @classmethod
    def whole(
        cls, name: str, parameter: nn.Parameter, sharding: Sharding = WHOLE, *, counted: bool = True
    ) -> "Portion":
        """Make the portion that is all this rank holds of a parameter."""
        shape = torch.Size(sharding.whole_shape(parameter.shape))
        return cls(name, parameter, shape, counted=counted, sharding=sharding)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this portion's part of a tensor of the whole parameter's shape."""
        return self.stretch(self.sharding.take(whole))

    def stretch(self, here: torch.Tensor) -> torch.Tensor:
        """Return this portion's part of what this rank has of such a tensor."""
        flat = here.reshape(-1)
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)
