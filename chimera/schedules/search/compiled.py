"""The list scheduler's kernel compiled by numba; only searches beyond small ones import this module."""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.schedules.search import kernel
from chimera.simulate.jit import compiled

__all__ = ["run"]

run: Final[Callable[[kernel.Instance, kernel.Progress, NDArray[np.float64]], None]] = compiled(
    [kernel.admits, kernel.choose, kernel.arrive, kernel.start, kernel.advance, kernel.run]
)
