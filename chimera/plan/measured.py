"""What a search takes in place of modelled times of layers, whatever it was measured by."""

from typing import Protocol

from chimera.plan.closed import ModelTimes
from chimera.plan.dims import Number
from chimera.plan.layout import Recompute

__all__ = ["MeasuredTimes"]


class MeasuredTimes(Protocol):
    """Measured times of layers, and the choices that they were measured for."""

    @property
    def option(self) -> str:
        """The option that they were given by."""
        ...

    @property
    def name(self) -> str:
        """What was measured."""
        ...

    @property
    def seq(self) -> int:
        """Tokens of its sequences."""
        ...

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks t."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """Whether these ranks shared what lies between their products."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes b."""
        ...

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """What a backward may run again."""
        ...

    def in_place_of(self, modelled: ModelTimes, *, microbatch: Number, recomputes: Number) -> ModelTimes:
        """Return the measured times.

        Args:
            modelled: times of the same layers.
            microbatch: b, one of the measured sizes.
            recomputes: 1 where the backward runs the block again, else 0.
        """
        ...
