"""Activation memory of a schedule by program order alone; what it costs in bytes or over time is the simulator's.

Unit: 1/p of the model's activations for one whole micro-batch. One stage of S on p ranks counts p/S of it, times the
schedule's share of a micro-batch, from its F until its B, or until its W where the backward is split; where less than
all is held from I to W, the rest goes at I. In a program of forwards alone it is held only while F runs. Buffers of
receives and weight versions are not counted.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.schedule import Schedule
from chimera.ir.table import Table
from chimera.ir.violation import Violation, violation_at

__all__ = ["activation_changes", "over_limit", "peak_activations", "peaks"]


def activation_changes(table: Table, held_for_weight_grad: NDArray[np.float64] | None = None) -> NDArray[Any]:
    """Return per row +1 where it starts to hold its stage's activations, −1 where it lets them go at its end, else 0.

    A backward that is split lets go at W; with ``held_for_weight_grad`` [stage], the share that W needs, of the rest at
    I.
    """
    change = np.zeros(256, np.int8)
    change[Kind.F] = +1
    change[[Kind.B, Kind.W]] = -1
    if held_for_weight_grad is None:
        return change[table.kind]
    held = held_for_weight_grad[table.stage]
    return np.where(table.kind == Kind.I, held - 1.0, np.where(table.kind == Kind.W, -held, change[table.kind]))


def peaks(
    table: Table, per_stage: NDArray[np.float64], held_for_weight_grad: NDArray[np.float64] | None = None
) -> tuple[float, ...]:
    """Return the most each rank holds at once when a micro-batch holds ``per_stage[stage]``.

    Where nothing lets go (forwards alone), each F holds its activations only while it runs.
    """
    change = activation_changes(table, held_for_weight_grad)
    if held_for_weight_grad is None:
        change = change.astype(np.int64)
    uniform = bool((per_stage == per_stage[0]).all())
    # Equal stages are counted in whole numbers, so that long programs lose nothing to rounding.
    scale = float(per_stage[0]) if uniform else 1.0
    held = _held(table, change if uniform else change * per_stage[table.stage])
    return tuple(float(held[a:b].max(initial=0)) * scale for a, b in pairwise(table.offsets.tolist()))


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return the most activations each rank holds at once, in units of 1/p of the model for one micro-batch.

    >>> peak_activations(Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], routes=[[0, 1]]))
    (2.0, 1.0)
    """
    return peaks(schedule.table, np.full(schedule.num_stages, _unit(schedule)))


def over_limit(schedule: Schedule, memory_limit: float) -> list[Violation]:
    """Return, per rank over the limit, the first action that lifts it above.

    Raises:
        UsageError: the limit is no number above 0.
    """
    if not memory_limit > 0:  # written so that it holds for NaN
        raise UsageError(
            f"--memory-limit {memory_limit:g}: needed: a number above 0, in units of 1/p of the model for a micro-batch"
        )
    table, unit = schedule.table, _unit(schedule)
    held = _held(table, activation_changes(table).astype(np.int64))
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


def _held(table: Table, change: NDArray[Any]) -> NDArray[Any]:
    """Add up each rank's changes; a program in which nothing lets go holds one change at a time."""
    if not (change < 0).any():
        return change
    return np.concatenate([np.cumsum(change[a:b]) for a, b in pairwise(table.offsets.tolist())])
