"""Sends and receives put into a compute-only schedule.

A SEND stands right behind the computation that makes its data. A RECV is posted ahead of its consumer, a bounded number
per channel: message n once the consumer of message n − depth is done. Posts come before sends at the same place, and
the order of a channel's RECVs is the order of its SENDs. Neighbouring stages on one rank exchange no message.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from chimera.errors import ScheduleError, UsageError
from chimera.ir.action import Kind
from chimera.ir.checks import check, report, violations
from chimera.ir.checks_messages import Routing
from chimera.ir.rows import NOTHING, Rows, code_mask
from chimera.ir.schedule import Schedule
from chimera.ir.table import Table
from chimera.passes.derived import has_backward
from chimera.passes.insertion import Insertion, insert_rows

__all__ = ["add_communication", "communicating"]


def add_communication(schedule: Schedule, *, receive_depth: int | None = 2) -> Schedule:
    """Return the schedule with sends and receives, proved.

    Args:
        schedule: without sends and receives; with or without reductions, or forward only.
        receive_depth: receives posted ahead on each channel; each holds a buffer. Doubled as often as the proof finds
            the ranks stuck. None posts all of them at the start.

    Raises:
        ScheduleError: the schedule is wrong, or has sends or receives already.
    """
    if schedule.is_lowered:
        raise ScheduleError(
            f"schedule {schedule.name!r} has sends and receives already; take them out with "
            "passes.derived.compute_only first"
        )
    check(schedule, forward_only=not has_backward(schedule))
    return communicating(schedule, receive_depth=receive_depth)


def communicating(schedule: Schedule, *, receive_depth: int | None) -> Schedule:
    """Do what ``add_communication`` does for a schedule that has been checked."""
    if receive_depth is not None and receive_depth < 1:
        raise UsageError(f"receive_depth is {receive_depth}; needed: at least 1, or None for all at the start; try 2")
    rows = Rows.of(schedule)
    routing = Routing.of(rows)
    forward_only = not has_backward(schedule)
    found = []
    for depth in _depths(receive_depth, len(routing)):
        lowered = schedule.with_table(_with_messages(rows, routing, depth))
        found = violations(lowered, forward_only=forward_only)
        if not found:
            return lowered
        if any(violation.rule != "deadlock" for violation in found):
            break
    raise ScheduleError(report(lowered, found))


def _depths(first: int | None, messages: int) -> Iterator[int | None]:
    """Yield the depths to try: the one asked for, its doubles while they can matter, and no bound."""
    if first is not None:
        while first < messages:
            yield first
            first *= 2
    yield None


def _with_messages(rows: Rows, routing: Routing, depth: int | None) -> Table:
    position = rows.table.position
    sent = np.lexsort((routing.producer, routing.channel))
    consumer = routing.consumer[sent]
    receives = Insertion(
        rank=rows.rank[consumer],
        gap=_posts(routing.channel[sent], position[consumer].astype(np.int64), _latest_gap(rows, consumer), depth),
        kind=np.where(routing.forward[sent], Kind.RECV_F, Kind.RECV_B).astype(np.uint8),
        stage=routing.stage[sent],
        microbatch=routing.microbatch[sent],
    )
    made = np.argsort(routing.producer)
    producer = routing.producer[made]
    sends = Insertion(
        rank=rows.rank[producer],
        gap=position[producer] + 1,
        kind=np.where(routing.forward[made], Kind.SEND_F, Kind.SEND_B).astype(np.uint8),
        stage=rows.table.stage[producer],
        microbatch=routing.microbatch[made],
    )
    return insert_rows(rows.table, [receives, sends])


def _latest_gap(rows: Rows, consumer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the last gap for the receive of each consumer: before it, and before reductions that stand between.

    A reduction then moves no receive, so that runs without reductions post theirs at the same places.
    """
    table = rows.table
    number = np.where(code_mask(table, Kind.REDUCE_GRAD), NOTHING, np.arange(len(table)))
    before = np.concatenate([[NOTHING], np.maximum.accumulate(number)])[rows.first[consumer]]
    on_rank = before >= table.offsets[rows.rank[consumer]]
    gap: NDArray[np.int64] = np.where(on_rank, table.position[before] + 1, 0).astype(np.int64)
    return gap


def _posts(
    channel: NDArray[np.int64], consumer: NDArray[np.int64], latest: NDArray[np.int64], depth: int | None
) -> NDArray[np.int64]:
    """Return the gap where each message's receive is posted, at most ``latest``; messages by channel, then as sent.

    Where the consumers come in another order than the sends, a receive moves ahead far enough for the earliest
    consumer among its own message and those sent after it.
    """
    if depth is None or not len(channel):
        return np.zeros(len(channel), np.int64)
    begins = np.concatenate([[True], channel[1:] != channel[:-1]])
    group = np.cumsum(begins) - 1
    index = np.arange(len(channel)) - np.flatnonzero(begins)[group]
    freed = np.zeros(len(channel), np.int64)
    freed[depth:] = consumer[:-depth] + 1
    post = np.minimum(np.where(index < depth, 0, freed), latest)
    # A later channel's numbers are lifted above all of this one's, so one pass from the back serves them all.
    lift = group * (int(consumer.max()) + 1)
    suffix_minimum = np.minimum.accumulate((post + lift)[::-1])[::-1]
    gap: NDArray[np.int64] = suffix_minimum - lift
    return gap
