"""Rows of several ranks as one timeline: when a message was under way, by what its two ends know."""

import math

import numpy as np
import pytest

from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane
from chimera.runtime.gathered import timelines_of

UNKNOWN = math.nan
SCHEDULE = Schedule.from_text(
    ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
    routes=[[0, 1]],
)


def rows(*entries):
    return np.array([(*entry, *[UNKNOWN] * (6 - len(entry))) for entry in entries])


def spans(timeline, lane):
    return {str(s.action): (s.start, s.end) for r in range(2) for s in timeline.spans(r) if s.lane is lane}


@pytest.mark.parametrize(
    ("taken", "end"),
    [
        # (start and end of the wait, when it was there)
        ((11.0, 14.0, 13.0), 13.0),
        ((20.0, 20.1, 13.0), 13.0),
        ((11.0, 14.0, UNKNOWN), 14.0),
        ((20.0, 20.1, UNKNOWN), 12.0),
    ],
    ids=["noted, awaited", "noted, there before", "awaited", "there before"],
)
def test_a_message_is_under_way_from_its_send_until_it_is_there(taken, end):
    """Its arrival is what was noted; else the end of a wait that began before the send returned; else that return."""
    first = rows((0, Lane.COMPUTE, 10.0, 11.5), (1, Lane.SEND, 11.5, 12.0), (3, Lane.COMPUTE, 30.0, 31.0))
    second = rows((0, Lane.RECEIVE, *taken), (1, Lane.COMPUTE, 21.0, 22.0), (2, Lane.COMPUTE, 22.0, 24.0))
    (timeline,) = timelines_of(SCHEDULE, [[first, second]])
    assert spans(timeline, Lane.SEND) == {"0SEND_F0": (1.5, end - 10.0)}
    assert spans(timeline, Lane.RECEIVE) == {"1RECV_F0": (1.5, end - 10.0)}
    assert spans(timeline, Lane.COMPUTE)["0F0"] == (0.0, 1.5)
    assert timeline.recorded_memory is None


def test_memory_is_what_was_allocated_behind_each_computation():
    """Where every rank noted it, the curves are the allocator's."""
    first = rows((0, Lane.COMPUTE, 0.0, 1.0, UNKNOWN, 300.0), (3, Lane.COMPUTE, 5.0, 6.0, UNKNOWN, 200.0))
    second = rows((1, Lane.COMPUTE, 2.0, 3.0, UNKNOWN, 700.0))
    (timeline,) = timelines_of(SCHEDULE, [[first, second]])
    assert timeline.peak_bytes == (300.0, 700.0)
    assert timeline.memory(0).times.tolist() == [1.0, 6.0]
