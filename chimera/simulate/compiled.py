"""The simulator's kernel compiled by numba; only large simulations import this module."""

from collections.abc import Callable
from typing import Final

from chimera.simulate import kernel
from chimera.simulate.jit import compiled

__all__ = ["run"]

run: Final[Callable[[kernel.Problem, kernel.Progress], int]] = compiled(
    [kernel.ready_time, kernel.slot_of, kernel.wake, kernel.reduce_from, kernel.reduced_time, kernel.run]
)
