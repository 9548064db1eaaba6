"""The critical path of a simulated step as counts: how many computations of each kind are on it, and how many messages.

``simulate.critical_path`` tells a path to people, span by span. Here thousands of paths are counted, so that rows are
looked up in plain lists. The dependency relation is asked of ``ir.dependencies`` as it is there.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Kind
from chimera.ir.dependencies import NEEDS, PHASES
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline

__all__ = ["KINDS", "counted_path"]

KINDS: Final = (Kind.F, Kind.I, Kind.W)
"""Kinds that paths are counted in; a whole backward is one I and one W."""

_COUNTED: Final = {Kind.F: (0,), Kind.B: (1, 2), Kind.I: (1,), Kind.W: (2,)}
_NO_ROW: Final = -1


def counted_path(schedule: Schedule, timeline: Timeline, hop: float) -> tuple[NDArray[np.float64], int]:
    """Return the computations of a critical path, [kind F I W, stage], and its messages.

    The chain goes back from the last end: each computation began when the rank's one before it ended, or when the last
    of its needs was there.

    Args:
        schedule: computations only.
        timeline: simulated, every message taking ``hop``.
        hop: time of a message.

    Returns:
        Counts; number of messages.
    """
    table = schedule.table
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    producer = np.full((len(PHASES), num_stages, num_microbatches), _NO_ROW)
    for kind, phase in PHASES.items():
        rows = np.flatnonzero(table.kind == kind)
        producer[phase, table.stage[rows], table.microbatch[rows]] = rows
    made_by = producer.ravel().tolist()
    kinds, stages, microbatches = table.kind.tolist(), table.stage.tolist(), table.microbatch.tolist()
    paired, ranks, ends = table.paired.tolist(), table.rank.tolist(), timeline.end.tolist()
    phase_of = [PHASES.get(kind) for kind in Kind]
    needed = [[(int(on), offset) for phase, on, offset in NEEDS if phase is own] for own in phase_of]
    counts = [[0] * num_stages for _ in KINDS]
    hops = 0
    row = int(np.argmax(timeline.end))
    while True:
        rank = ranks[row]
        # A pair is known by its first row, and waits for the needs of both.
        first = row - 1 if paired[row] and kinds[row] != Kind.F else row
        both = (first, first + 1) if paired[first] else (first,)
        before = first - 1 if first and ranks[first - 1] == rank else _NO_ROW
        latest, at, sent = before, ends[before] if before != _NO_ROW else 0.0, False
        for part in both:
            stage, microbatch = stages[part], microbatches[part]
            for place in _COUNTED[Kind(kinds[part])]:
                counts[place][stage] += 1
            for on, offset in needed[kinds[part]]:
                if not 0 <= stage + offset < num_stages:
                    continue
                source = made_by[(on * num_stages + stage + offset) * num_microbatches + microbatch]
                across = ranks[source] != rank
                there = ends[source] + (hop if across else 0.0)
                if there > at and source not in both:
                    latest, at, sent = source, there, across
        if latest == _NO_ROW:
            return np.array(counts, np.float64), hops
        hops += sent
        row = latest
