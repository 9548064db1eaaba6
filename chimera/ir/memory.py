"""Activation memory of a schedule by program order alone; what it costs in bytes or over time is the simulator's.

Unit: 1/p of the model's activations for one whole micro-batch. One stage of S on p ranks counts p/S of it, times the
schedule's share of a micro-batch, from its F until its B, or until its W where the backward is split. Buffers of
receives and weight versions are not counted.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Kind
from chimera.ir.schedule import Schedule
from chimera.ir.violation import Violation, violation_at

__all__ = ["over_limit", "peak_activations"]

_CHANGES = {Kind.F: +1, Kind.B: -1, Kind.W: -1}


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return the most activations each rank holds at once, in units of 1/p of the model for one micro-batch.

    >>> from chimera.ir.schedule import Schedule
    >>> peak_activations(Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]]))
    (2.0, 1.0)
    """
    held, unit, offsets = _held(schedule), _unit(schedule), schedule.table.offsets.tolist()
    return tuple(float(held[a:b].max(initial=0)) * unit for a, b in pairwise(offsets))


def over_limit(schedule: Schedule, memory_limit: float) -> list[Violation]:
    """Return, per rank over the limit, the first action that lifts it above."""
    held, unit, table = _held(schedule), _unit(schedule), schedule.table
    found = []
    for first, end in pairwise(table.offsets.tolist()):
        # A limit such as 7/3 is rounded, and so is a number of units of 1/3.
        above = np.flatnonzero(held[first:end] * unit > memory_limit + 1e-6 * unit)
        if len(above):
            peak = float(held[first:end].max()) * unit
            message = (
                f"holds {held[first + above[0]] * unit:g} units of activations here and {peak:g} at most, over the "
                f"limit of {memory_limit:g}; raise --memory-limit, run a backward earlier or take another schedule"
            )
            found.append(violation_at(table, first + int(above[0]), "memory", message))
    return found


def _unit(schedule: Schedule) -> float:
    return schedule.num_ranks / schedule.num_stages * schedule.microbatch_share


def _held(schedule: Schedule) -> NDArray[np.int64]:
    """Return the number of stage activations each rank holds from each row on."""
    table = schedule.table
    change = np.zeros(256, np.int64)
    for kind, amount in _CHANGES.items():
        change[kind] = amount
    held: NDArray[np.int64] = np.cumsum(change[table.kind])
    before = np.concatenate([[0], held])[table.offsets[:-1]]
    held -= np.repeat(before, np.diff(table.offsets))
    return held
