"""The recorded rows of all ranks of a pipeline as one ``Timeline``, messages in flight at both ends as in a simulation.

A sender knows when a message left it and its receiver when it was there, so the two are put together here: both ends
get the span from the one to the other. Nothing is measured here, and there is no tensor.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Action, Instruction, Overlap
from chimera.ir.costs import Costs
from chimera.ir.dependencies import MESSAGES
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, MemoryCurve, Timeline

__all__ = ["COLUMNS", "timelines_of"]

COLUMNS: Final = 6
"""Of a row: position in the program, lane, start and end; of a receive, when its message was there; bytes allocated.

The last two are not a number where they are not known.
"""

_Rows = NDArray[np.float64]
_Span = tuple[int, Lane, Instruction, float, float]


def timelines_of(schedule: Schedule, pipelines: Sequence[Sequence[_Rows]]) -> tuple[Timeline, ...]:
    """Return the timeline of each pipeline, in seconds from its first start.

    Args:
        schedule: that ran on each.
        pipelines: for each, the rows of its ranks, on one clock.
    """
    return tuple(_timeline(schedule, ranks) for ranks in pipelines)


def _timeline(schedule: Schedule, ranks: Sequence[_Rows]) -> Timeline:
    leaving, taken = _ends_of_messages(schedule, ranks)
    spans: list[_Span] = []
    for rank, rows in enumerate(ranks):
        for position, code, begin, finish, *_ in rows.tolist():
            lane, instruction = Lane(int(code)), schedule.actions[rank][int(position)]
            start, end = begin, finish
            key = None if isinstance(instruction, Overlap) else _message(instruction)
            if key in leaving and key in taken:
                start, end = leaving[key][0], _there(leaving[key], taken[key])
            spans.append((rank, lane, instruction, start, end))
    zero = min((start for *_, start, _ in spans), default=0.0)
    return Timeline.from_spans(
        [(rank, lane, what, start - zero, end - zero) for rank, lane, what, start, end in spans],
        num_ranks=len(ranks),
        name=schedule.name,
        activations=Costs().resolve(schedule).activations,
        recorded_memory=_memory(ranks, zero),
        microbatch_to_route=schedule.microbatch_to_route,
    )


_Key = tuple[int, int, int]
"""What a message is known by at both ends: phase, sending stage, micro-batch."""


def _ends_of_messages(
    schedule: Schedule, ranks: Sequence[_Rows]
) -> tuple[dict[_Key, tuple[float, float]], dict[_Key, tuple[float, float, float]]]:
    """Return when each message was sent (start, end of the call), and taken (start and end of the wait, arrival)."""
    leaving: dict[_Key, tuple[float, float]] = {}
    taken: dict[_Key, tuple[float, float, float]] = {}
    for rank, rows in enumerate(ranks):
        for position, code, start, end, arrived, _ in rows.tolist():
            if int(code) in (Lane.SEND, Lane.RECEIVE):
                instruction = schedule.actions[rank][int(position)]
                assert isinstance(instruction, Action), "a pair is no message"
                key = _message(instruction)
                assert key is not None, "messages have lanes of their own"
                if int(code) == Lane.SEND:
                    leaving[key] = start, end
                else:
                    taken[key] = start, end, arrived
    return leaving, taken


def _message(action: Action) -> _Key | None:
    for message in MESSAGES:
        if action.kind in (message.send, message.receive) and action.microbatch is not None:
            sender = action.stage if action.kind is message.send else action.stage + message.sender
            return message.phase, sender, action.microbatch
    return None


def _there(sent: tuple[float, float], taken: tuple[float, float, float]) -> float:
    """Return when a message was there, as well as it is known."""
    start, end = sent
    waited_from, waited_until, arrived = taken
    if not np.isnan(arrived):
        return max(arrived, start)
    # Without a note of it: whoever waits already takes it as it comes, else it was there when the send returned.
    return max(waited_until if waited_from <= end else end, start)


def _memory(ranks: Sequence[_Rows], zero: float) -> list[MemoryCurve] | None:
    """Return what was allocated over time on each rank, None where nobody looked."""
    known = [rows[~np.isnan(rows[:, 5])] for rows in ranks]
    if not all(len(rows) for rows in known):
        return None
    ordered = (rows[np.argsort(rows[:, 3], kind="stable")] for rows in known)
    return [MemoryCurve(rows[:, 3] - zero, rows[:, 5], "bytes") for rows in ordered]
