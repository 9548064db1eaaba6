"""The messages of a lowered schedule: which are needed, whether each is sent and received once, and in which order.

A message is named by what it carries: an activation into stage s, or a gradient into stage s, of a micro-batch. A
channel is a directed (source rank, destination rank, route) edge, forward and backward together, on which messages
arrive in the order they were sent. Whether the programs get stuck is decided in ``checks_progress``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import COMMUNICATIONS, Action, Kind
from chimera.ir.checks_complete import repeated_rows
from chimera.ir.dependencies import MESSAGES, Phase
from chimera.ir.rows import NOTHING, Rows, code_mask
from chimera.ir.violation import Violation, violation_at

__all__ = ["Messages", "Routing", "message_violations"]


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The data that crosses ranks, one entry per message, activations first.

    Attributes:
        forward: whether it is an activation, else a gradient.
        stage: the receiving stage.
        microbatch: whose data it is.
        producer: the row of the computation that makes it.
        consumer: the row of the computation that needs it.
        channel: the number of its channel, equal for equal (source, destination, route).
    """

    forward: NDArray[np.bool_]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    producer: NDArray[np.int64]
    consumer: NDArray[np.int64]
    channel: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Rows) -> "Routing":
        """Find every need of a complete schedule that crosses ranks; schedules without backward have no gradients."""
        table = rows.table
        crossing = [
            (need.row[crosses], need.producer[crosses])
            for need in rows.needs()
            if (crosses := rows.rank[need.row] != rows.rank[need.producer]).any()
        ]
        consumer = np.concatenate([np.empty(0, np.int64), *(pair[0] for pair in crossing)])
        producer = np.concatenate([np.empty(0, np.int64), *(pair[1] for pair in crossing)])
        forward = table.kind[consumer] == Kind.F
        stage, microbatch = table.stage[consumer].astype(np.int64), table.microbatch[consumer].astype(np.int64)
        channel = _channel(rows, rows.rank[producer], rows.rank[consumer], microbatch)
        return cls(forward, stage, microbatch, producer, consumer, channel)

    def __len__(self) -> int:
        return len(self.stage)


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The rows of every needed message: who makes the data, sends, receives and uses it; all complete."""

    routing: Routing
    send: NDArray[np.int64]
    receive: NDArray[np.int64]

    @property
    def consumer(self) -> NDArray[np.int64]:
        """The row of the computation that needs each message."""
        return self.routing.consumer


def _channel(
    rows: Rows, source: NDArray[np.int32], destination: NDArray[np.int32], microbatch: NDArray[np.int64]
) -> NDArray[np.int64]:
    ranks, routes = rows.placement.num_ranks, len(rows.placement.routes)
    return (source.astype(np.int64) * ranks + destination) * routes + rows.route[microbatch]


def _channel_text(rows: Rows, channel: int) -> str:
    pair, route = divmod(channel, len(rows.placement.routes))
    source, destination = divmod(pair, rows.placement.num_ranks)
    return f"the channel from rank {source} to rank {destination} on route {route}"


def message_violations(rows: Rows) -> tuple[list[Violation], Messages | None]:
    """Check sends and receives; return what is wrong and, if all messages are there, their rows.

    Needed are: one SEND after the producing computation, one RECV before the consumer, on each channel RECVs in the
    order of the SENDs, and no message that nobody needs (adjacent stages on one rank hand over directly).
    """
    routing = Routing.of(rows)
    found = list(_repeated(rows))
    send, receive, strays = _matched_rows(rows, routing)
    found.extend(strays)
    found.extend(_missing(rows, routing, send, receive))
    if found:
        return found, None
    messages = Messages(routing, send, receive)
    found.extend(_misplaced(rows, messages))
    found.extend(_out_of_order(rows, messages))
    return found, messages


def _repeated(rows: Rows) -> Iterator[Violation]:
    table = rows.table
    communications = np.flatnonzero(code_mask(table, *COMMUNICATIONS))
    keys = (table.kind[communications], table.stage[communications], table.microbatch[communications])
    for row in repeated_rows(communications, *keys).tolist():
        yield violation_at(table, row, "messages", "it stands in the schedule already; remove one of them")


def _matched_rows(rows: Rows, routing: Routing) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Violation]]:
    """Return the SEND and the RECV row of each needed message (or ``NOTHING``), and those that serve none."""
    table = rows.table
    send = np.full(len(routing), NOTHING, np.int64)
    receive = np.full(len(routing), NOTHING, np.int64)
    strays: list[Violation] = []
    for phase, sender, send_kind, receive_kind in MESSAGES:
        entries = np.flatnonzero(routing.forward == (phase is Phase.FORWARD))
        number = np.full(rows.home.shape, NOTHING, np.int64)
        number[routing.stage[entries], routing.microbatch[entries]] = entries
        for kind, peer, receiver, column in ((send_kind, -sender, -sender, send), (receive_kind, sender, 0, receive)):
            own = np.flatnonzero(table.kind == kind)
            stage = table.stage[own] + receiver
            inside = (stage >= 0) & (stage < rows.placement.num_stages)
            message = np.where(inside, number[np.where(inside, stage, 0), table.microbatch[own]], NOTHING)
            needed = message != NOTHING
            column[message[needed]] = own[needed]
            strays.extend(_stray(rows, row, peer) for row in own[~needed].tolist())
    return send, receive, strays


def _stray(rows: Rows, row: int, peer: int) -> Violation:
    action = rows.table.action_at(row)
    other = action.stage + peer
    if not 0 <= other < rows.placement.num_stages:
        why = f"stage {action.stage} has no neighbour on that side; remove it"
    elif rows.home[other, action.microbatch] == rows.rank[row]:
        why = f"stage {other} is on the same rank and hands over directly; remove it"
    else:
        why = "no computation needs this message; remove it"
    return violation_at(rows.table, row, "messages", why)


def _missing(rows: Rows, routing: Routing, send: NDArray[np.int64], receive: NDArray[np.int64]) -> Iterator[Violation]:
    for entry in np.flatnonzero((send == NOTHING) | (receive == NOTHING)).tolist():
        producer, consumer = int(routing.producer[entry]), int(routing.consumer[entry])
        _, sender, send_kind, receive_kind = MESSAGES[0 if routing.forward[entry] else 1]
        stage, microbatch = int(routing.stage[entry]), int(routing.microbatch[entry])
        sent, received = Action(send_kind, stage + sender, microbatch), Action(receive_kind, stage, microbatch)
        needing = f"{rows.table.action_at(consumer)} of rank {rows.rank[consumer]}"
        if send[entry] == NOTHING:
            position = int(rows.table.position[producer]) + 1
            why = f"missing: {needing} waits for it; add it here, after the computation that makes its data"
            yield Violation(int(rows.rank[producer]), position, str(sent), why, "messages")
        if receive[entry] == NOTHING:
            position = int(rows.table.position[consumer])
            why = f"missing: {needing} needs what it brings; add it before that"
            yield Violation(int(rows.rank[consumer]), position, str(received), why, "messages")


def _misplaced(rows: Rows, messages: Messages) -> Iterator[Violation]:
    table, routing = rows.table, messages.routing
    for entry in np.flatnonzero(messages.send < rows.last[routing.producer]).tolist():
        made = f"position {table.position[routing.producer[entry]]}"
        why = f"it sends what only the computation at {made} makes; move it behind that"
        yield violation_at(table, int(messages.send[entry]), "messages", why)
    for entry in np.flatnonzero(messages.receive > rows.first[routing.consumer]).tolist():
        consumer = int(routing.consumer[entry])
        used = f"{table.action_at(consumer)} at position {table.position[consumer]}"
        why = f"{used} needs what it brings; move it before that"
        yield violation_at(table, int(messages.receive[entry]), "messages", why)


def _out_of_order(rows: Rows, messages: Messages) -> Iterator[Violation]:
    """Compare, per channel, the n-th message sent with the n-th received; report the first that differs."""
    table, channel = rows.table, messages.routing.channel
    by_send, by_receive = np.lexsort((messages.send, channel)), np.lexsort((messages.receive, channel))
    swapped = np.flatnonzero(by_send != by_receive)
    channels, first = np.unique(channel[by_send[swapped]], return_index=True)
    starts = np.searchsorted(channel[by_send], channels)
    for index, start in zip(swapped[first].tolist(), starts.tolist(), strict=True):
        sent, received = int(messages.send[by_send[index]]), int(messages.receive[by_receive[index]])
        number, where = index - start, _channel_text(rows, int(channel[by_send[index]]))
        why = (
            f"message {number} to be received on {where}, but message {number} sent there is {table.action_at(sent)} "
            f"at position {table.position[sent]}: they would be swapped. Put the receives in the order of the sends"
        )
        yield violation_at(table, received, "fifo", why)
