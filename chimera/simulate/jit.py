"""Functions compiled by numba that call one another, while the module they come from stays plain Python.

It knows numba and no algorithm. Only large questions import it, and with it numba; compiled code is cached on disk
between processes.
"""

import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numba

__all__ = ["compiled"]


def compiled(in_order_of_calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Compile the functions of one module, each after those that it calls, and return the last one's compiled form."""
    first = in_order_of_calls[0]
    names = dict(vars(sys.modules[first.__module__]))
    for function in in_order_of_calls:
        assert isinstance(function, FunctionType), f"{function} is no function written in Python"
        # numba resolves callees through the globals of a function, so each is rebuilt over globals that hold the
        # compiled forms of those before it; the module's own functions stay plain Python.
        rebuilt = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        rebuilt.__module__, rebuilt.__qualname__ = function.__module__, function.__qualname__
        try:
            names[function.__name__] = numba.njit(cache=True)(rebuilt)
        except RuntimeError:
            # No folder can be written, neither beside this file nor in the user's cache: compile for this process.
            names[function.__name__] = numba.njit(rebuilt)
    last: Callable[..., Any] = names[in_order_of_calls[-1].__name__]
    return last
