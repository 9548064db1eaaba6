"""What stays on a device for the whole step, and what a layer needs beside what it keeps. Bytes; numbers and columns.

Mixed precision with Adam is 18 bytes per parameter: a 16-bit weight, an fp32 gradient, an fp32 weight and two moments;
6 + 12/d with sharded optimizer states (Korthikanti et al. 2022, §4). In fp32 there is no second weight.
"""

from typing import Final

from chimera.plan.dims import Number
from chimera.plan.hardware import DTYPE_BYTES

__all__ = ["CONTEXT_BYTES", "FRAGMENTATION", "margin_bytes", "message_buffer_bytes", "optimizer_bytes"]

CONTEXT_BYTES: Final = 0.75 * 2**30
"""Of the device's context, its libraries and their communicators. An assumption, not fitted."""

FRAGMENTATION: Final = 0.02
"""Share of all other memory that the allocator loses. An assumption, not fitted."""


def optimizer_bytes(dtype: str) -> float:
    """Return the bytes of Adam's state for one parameter."""
    return 8.0 if DTYPE_BYTES[dtype] == 4 else 12.0


def message_buffer_bytes(message: Number, pipeline: Number) -> Number:
    """Return the bytes of two messages in either direction, each twice: one in flight, one in use."""
    return 4 * message * (pipeline > 1)


def margin_bytes(held: Number) -> Number:
    """Return what fragmentation and the device's own context take beside ``held`` bytes."""
    return CONTEXT_BYTES + FRAGMENTATION * held
