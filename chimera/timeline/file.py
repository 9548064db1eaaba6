"""Timeline files: strict JSON, per rank four columns (lane, action, start, end), actions in their text form.

``{"format": "chimera-timeline", "version": 1, "name", "unit", "activations": [...], "microbatch_to_route": [...],
"ranks": [{"lane": ["compute", ...], "action": ["0F0", ...], "start": [...], "end": [...]}, ...]}``, and where known
``activation_bytes`` and ``held_for_weight_grad`` (a share) per stage, ``resident_bytes`` per rank and ``memory`` per
rank (times, values, unit).
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from chimera.errors import FormatError
from chimera.ir.action import Instruction, parse_instruction
from chimera.ir.costs import MODEL_UNIT, SECOND
from chimera.ir.files import check_keys, read_json_object, replacing, shown
from chimera.ir.timeline import Lane, MemoryCurve, Timeline

__all__ = ["read_timeline", "write_timeline"]

_FORMAT: Final = "chimera-timeline"
_VERSION: Final = 1
_LANES: Final = {lane.name.lower(): lane for lane in Lane}
_COLUMNS: Final = {"lane", "action", "start", "end"}
_MEMORY_COLUMNS: Final = ("activation_bytes", "resident_bytes", "held_for_weight_grad")
_OPTIONAL: Final = {*_MEMORY_COLUMNS, "memory"}
_REQUIRED: Final = {"name", "unit", "activations", "microbatch_to_route", "ranks"}


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write ``timeline``; reading gives it back bit for bit. The file appears whole or not at all."""
    data: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": timeline.name,
        "unit": timeline.unit,
        "activations": timeline.activations.tolist(),
        "microbatch_to_route": list(timeline.microbatch_to_route),
        "ranks": [_rank_columns(timeline, rank) for rank in range(timeline.num_ranks)],
    }
    for name in _MEMORY_COLUMNS:
        if (column := getattr(timeline, name)) is not None:
            data[name] = column.tolist()
    if timeline.recorded_memory is not None:
        data["memory"] = [
            {"times": curve.times.tolist(), "values": curve.values.tolist(), "unit": curve.unit}
            for curve in timeline.recorded_memory
        ]
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def read_timeline(path: str | Path) -> Timeline:
    """Read a timeline file.

    Raises:
        FormatError: the file is not strict JSON of this format, an action cannot be parsed, a column has another length
            than its neighbours, or a span ends before it starts.
    """
    data = read_json_object(path, format_name=_FORMAT, version=_VERSION)
    check_keys(data, required=_REQUIRED, optional=_OPTIONAL, where=str(path))
    if not isinstance(data["unit"], str) or data["unit"] not in {MODEL_UNIT, SECOND}:
        raise FormatError(f"{path}: unit is {shown(data['unit'])}; needed: {MODEL_UNIT!r} or {SECOND!r}")
    if not isinstance(data["name"], str):
        raise FormatError(f"{path}: name is {shown(data['name'])}; needed: text")
    ranks = _list(data["ranks"], f"{path}: ranks")
    known: dict[str, Instruction] = {}
    spans: list[tuple[int, int, Instruction, float, float]] = []
    for rank, columns in enumerate(ranks):
        spans += _read_rank(rank, columns, known, f"{path}: ranks[{rank}]")
    memory = _read_memory(data["memory"], len(ranks), f"{path}: memory") if "memory" in data else None
    routes = _list(data["microbatch_to_route"], f"{path}: microbatch_to_route")
    if any(isinstance(route, bool) or not isinstance(route, int) or route < 0 for route in routes):
        raise FormatError(f"{path}: microbatch_to_route holds something other than route numbers")
    timeline = Timeline.from_spans(
        spans,
        num_ranks=len(ranks),
        name=data["name"],
        unit=data["unit"],
        activations=_numbers(data["activations"], f"{path}: activations"),
        recorded_memory=memory,
        microbatch_to_route=routes,
        in_program_order=True,
    )
    return _with_bytes(timeline, data, str(path))


def _rank_columns(timeline: Timeline, rank: int) -> dict[str, list[Any]]:
    spans = list(timeline.spans(rank))
    return {
        "lane": [span.lane.name.lower() for span in spans],
        "action": [str(span.action) for span in spans],
        "start": [span.start for span in spans],
        "end": [span.end for span in spans],
    }


def _read_rank(
    rank: int, columns: Any, known: dict[str, Instruction], where: str
) -> list[tuple[int, int, Instruction, float, float]]:
    if not isinstance(columns, dict):
        raise FormatError(f"{where} is a {type(columns).__name__}; needed: an object with lane, action, start, end")
    check_keys(columns, required=_COLUMNS, optional=set(), where=where)
    lanes, actions = (_list(columns[name], f"{where}: {name}") for name in ("lane", "action"))
    starts, ends = (_numbers(columns[name], f"{where}: {name}") for name in ("start", "end"))
    if not len(lanes) == len(actions) == len(starts) == len(ends):
        lengths = ", ".join(f"{name} {len(columns[name])}" for name in sorted(_COLUMNS))
        raise FormatError(f"{where}: columns of different lengths: {lengths}")
    spans: list[tuple[int, int, Instruction, float, float]] = []
    for i, (lane, text, start, end) in enumerate(zip(lanes, actions, starts, ends, strict=True)):
        if not isinstance(lane, str) or lane not in _LANES:
            raise FormatError(f"{where}: lane[{i}] is {shown(lane)}; needed: one of {', '.join(_LANES)}")
        if not isinstance(text, str):
            raise FormatError(f"{where}: action[{i}] is {shown(text)}; needed: text such as 0F0")
        if end < start:
            raise FormatError(f"{where}: {text} ends at {end}, before its start {start}")
        if text not in known:
            known[text] = parse_instruction(text, f"{where}: action[{i}]")
        spans.append((rank, _LANES[lane], known[text], start, end))
    return spans


def _read_memory(data: Any, num_ranks: int, where: str) -> list[MemoryCurve]:
    curves = []
    for rank, curve in enumerate(_list(data, where)):
        place = f"{where}[{rank}]"
        if not isinstance(curve, dict):
            raise FormatError(f"{place} is {shown(curve)}; needed: an object with times, values, unit")
        check_keys(curve, required={"times", "values", "unit"}, optional=set(), where=place)
        times, values = _numbers(curve["times"], f"{place}: times"), _numbers(curve["values"], f"{place}: values")
        if len(times) != len(values):
            raise FormatError(f"{place}: {len(times)} times for {len(values)} values")
        curves.append(MemoryCurve(np.array(times), np.array(values), str(curve["unit"])))
    if len(curves) != num_ranks:
        raise FormatError(f"{where} has {len(curves)} curves; needed: {num_ranks}, one per rank")
    return curves


def _with_bytes(timeline: Timeline, data: dict[str, Any], where: str) -> Timeline:
    known = {name: np.array(_numbers(data[name], f"{where}: {name}")) for name in _MEMORY_COLUMNS if data.get(name)}
    timeline = replace(timeline, **cast("dict[str, Any]", known)) if known else timeline
    num_stages = int(timeline.table.stage.max(initial=-1)) + 1
    for name in ("activations", "activation_bytes", "held_for_weight_grad"):
        # No activations at all is legal: then every stage counts 1.
        if data.get(name) and len(data[name]) < num_stages:
            raise FormatError(f"{where}: {name} has {len(data[name])} numbers; needed: {num_stages}, one per stage")
    if timeline.resident_bytes is not None and len(timeline.resident_bytes) != timeline.num_ranks:
        raise FormatError(
            f"{where}: resident_bytes has {len(timeline.resident_bytes)} numbers; needed: {timeline.num_ranks}, "
            "one per rank"
        )
    return timeline


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where} is a {type(value).__name__}; needed: a list")
    return value


def _numbers(value: Any, where: str) -> list[float]:
    numbers = _list(value, where)
    for i, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= sys.float_info.max:
            raise FormatError(f"{where}[{i}] is {shown(number)}; needed: a finite number")
    return [float(number) for number in numbers]
