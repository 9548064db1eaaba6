"""The kernel compiled by numba: the same functions, each with its callees replaced by their compiled forms.

Only large simulations import this module, and with it numba; compiled code is cached on disk between processes.
"""

from types import FunctionType
from typing import TYPE_CHECKING

import numba

from chimera.simulate import kernel

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run"]


_IN_ORDER_OF_CALLS = (
    kernel.ready_time,
    kernel.slot_of,
    kernel.wake,
    kernel.reduce_from,
    kernel.reduced_time,
    kernel.run,
)


def _compile() -> "Callable[[kernel.Problem, kernel.Progress], int]":
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
    compiled: Callable[[kernel.Problem, kernel.Progress], int] = names["run"]
    return compiled


run = _compile()
