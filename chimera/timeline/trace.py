"""Chrome trace JSON of a timeline, as Perfetto and chrome://tracing load it.

Process = rank; thread 0 compute, 1 send, 2 receive, 3 collectives. Events of one thread must nest, so spans of a lane
that overlap go to further threads (4 more each time). An arrow leads from each send to the computation that needs it.
Times are microseconds from the first span; in a timeline of model units one unit is shown as one millisecond. Written
event by event: nothing is held but one rank's spans, and a number for each message.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from chimera.ir.action import Action, Instruction, Kind, Overlap, flatten
from chimera.ir.costs import SECOND
from chimera.ir.dependencies import NEEDS, PHASES, RECEIVED, SENT, Phase
from chimera.ir.files import replacing
from chimera.ir.timeline import Lane, Span, Timeline

__all__ = ["trace_events", "write_trace"]

_THREAD_NAMES: Final = {
    Lane.COMPUTE: "compute",
    Lane.SEND: "send",
    Lane.RECEIVE: "receive",
    Lane.REDUCE: "collectives",
}
_DIRECTIONS: Final = {
    kind: "forward" if phase is Phase.FORWARD else "backward" for kind, phase in (PHASES | SENT | RECEIVED).items()
}
_US_PER_S: Final = 1e6
_US_PER_MODEL_UNIT: Final = 1e3


def write_trace(timeline: Timeline, path: str | Path, *, memory: bool = True) -> None:
    """Write ``timeline`` as a trace file; it appears whole or not at all.

    Args:
        timeline: simulated or recorded.
        path: usually ``….json``.
        memory: whether each rank gets a counter of its memory.
    """
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        unit = "" if timeline.unit == SECOND else "; 1 model unit is shown as 1 ms"
        head = {"displayTimeUnit": "ms", "otherData": {"name": timeline.name, "unit": timeline.unit + unit}}
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [')
        for number, event in enumerate(trace_events(timeline, memory=memory)):
            file.write(("\n" if number == 0 else ",\n") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def trace_events(timeline: Timeline, *, memory: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the events, rank by rank: names, then spans by thread in order of time, then the memory counter."""
    scale = _US_PER_S if timeline.unit == SECOND else _US_PER_MODEL_UNIT
    zero = float(timeline.start.min()) if len(timeline.start) else 0.0
    messages = _messages(timeline)
    for rank in range(timeline.num_ranks):
        threads = _threads(timeline.spans(rank))
        yield _metadata("process_name", rank, name=f"rank {rank}")
        yield _metadata("process_sort_index", rank, sort_index=rank)
        for (lane, extra), spans in sorted(threads.items()):
            thread = lane + len(Lane) * extra
            name = _THREAD_NAMES[lane] + (f" ({extra + 1})" if extra else "")
            yield _metadata("thread_name", rank, thread, name=name)
            yield _metadata("thread_sort_index", rank, thread, sort_index=1000 * lane + extra)
            for span in spans:
                yield _complete(span, thread, timeline, zero=zero, scale=scale)
                for number, ends in _ends(span, messages):
                    yield _flow(span, thread, number, ends=ends, zero=zero, scale=scale)
        if memory and (timeline.table.kind == Kind.F).any():
            yield from _counter(timeline, rank, zero=zero, scale=scale)


def _threads(spans: Iterator[Span]) -> dict[tuple[Lane, int], list[Span]]:
    """Put each span on the first thread of its lane that is free at its start."""
    threads: dict[tuple[Lane, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        extra = 0
        while (thread := threads.setdefault((span.lane, extra), [])) and thread[-1].end > span.start:
            extra += 1
        thread.append(span)
    return threads


_Message = tuple[Phase, int, int]
"""Phase, sending stage, micro-batch."""


def _messages(timeline: Timeline) -> dict[_Message, int]:
    """Number the messages that were sent, so that both ends of an arrow are known by one number."""
    table = timeline.table
    rows = [row for row in range(len(table)) if Kind(int(table.kind[row])) in SENT]
    keys = ((SENT[Kind(int(table.kind[r]))], int(table.stage[r]), int(table.microbatch[r])) for r in rows)
    return {key: number for number, key in enumerate(keys)}


def _ends(span: Span, messages: dict[_Message, int]) -> Iterator[tuple[int, bool]]:
    """Yield (number, whether it ends here) of the arrows that touch a span: a send's own, and those of its messages."""
    for action in flatten([span.action]):
        if action.microbatch is None:
            continue
        if action.kind in SENT:
            yield messages[SENT[action.kind], action.stage, action.microbatch], False
        for phase, needed, offset in NEEDS:
            key = needed, action.stage + offset, action.microbatch
            if offset and PHASES.get(action.kind) is phase and key in messages:
                yield messages[key], True


def _flow(span: Span, thread: int, number: int, *, ends: bool, zero: float, scale: float) -> dict[str, Any]:
    place = {"pid": span.rank, "tid": thread, "ts": round((span.start - zero) * scale, 3)}
    # An end is bound to the event around it, not to the next one.
    return {"name": "message", "cat": "message", "ph": "f" if ends else "s", "id": number, **place} | (
        {"bp": "e"} if ends else {}
    )


def _complete(span: Span, thread: int, timeline: Timeline, *, zero: float, scale: float) -> dict[str, Any]:
    # Both ends are rounded, not the duration, so that spans which touch still touch.
    start, end = round((span.start - zero) * scale, 3), round((span.end - zero) * scale, 3)
    return {
        "name": str(span.action),
        "cat": _THREAD_NAMES[span.lane],
        "ph": "X",
        "pid": span.rank,
        "tid": thread,
        "ts": start,
        "dur": round(end - start, 3),
        "args": _arguments(span.action, timeline),
    }


def _arguments(instruction: Instruction, timeline: Timeline) -> dict[str, Any]:
    if isinstance(instruction, Overlap):
        return {
            "forward": _arguments(instruction.forward, timeline),
            "backward": _arguments(instruction.backward, timeline),
        }
    return {"stage": instruction.stage} | _microbatch_arguments(instruction, timeline)


def _microbatch_arguments(action: Action, timeline: Timeline) -> dict[str, Any]:
    if action.microbatch is None:
        return {}
    routes = timeline.microbatch_to_route
    return {
        "mb": action.microbatch,
        "direction": _DIRECTIONS[action.kind],
        "route": routes[action.microbatch] if action.microbatch < len(routes) else 0,
    }


def _counter(timeline: Timeline, rank: int, *, zero: float, scale: float) -> Iterator[dict[str, Any]]:
    curve = timeline.memory(rank)
    for time, value in zip(curve.times.tolist(), curve.values.tolist(), strict=True):
        yield {
            "name": f"memory ({curve.unit})",
            "ph": "C",
            "pid": rank,
            "ts": round((time - zero) * scale, 3),
            "args": {curve.unit: value},
        }


def _metadata(what: str, rank: int, thread: int | None = None, **arguments: str | int) -> dict[str, Any]:
    place = {"pid": rank} if thread is None else {"pid": rank, "tid": thread}
    return {"name": what, "ph": "M", **place, "args": arguments}
