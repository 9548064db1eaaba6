"""The list scheduler's kernel compiled by numba: the same functions, each with its callees in their compiled forms.

Only searches beyond small ones import this module, and with it numba; compiled code is cached on disk.
"""

from types import FunctionType
from typing import TYPE_CHECKING

import numba

from chimera.schedules.search import kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["run"]

_IN_ORDER_OF_CALLS = (kernel.admits, kernel.choose, kernel.arrive, kernel.start, kernel.advance, kernel.run)


def _compile() -> "Callable[[kernel.Instance, kernel.Progress, NDArray[np.float64]], None]":
    names = dict(vars(kernel))
    for function in _IN_ORDER_OF_CALLS:
        # numba resolves callees through the globals of a function, so each is rebuilt over globals that hold the
        # compiled forms of those before it; the module's own functions stay plain Python.
        rebuilt = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        rebuilt.__module__, rebuilt.__qualname__ = kernel.__name__, function.__qualname__
        try:
            names[function.__name__] = numba.njit(cache=True)(rebuilt)
        except RuntimeError:
            # No folder can be written, neither beside this file nor in the user's cache: compile for this process.
            names[function.__name__] = numba.njit(rebuilt)
    compiled: Callable[[kernel.Instance, kernel.Progress, NDArray[np.float64]], None] = names["run"]
    return compiled


run = _compile()
