"""The text form of a whole schedule: a short head, then one row of action text per rank.

::

    name: "chimera"
    routes: 0 1 | 1 0
    microbatches: 0 1
    0F0 1F1 1B1 0B0
    0F1 1F0 1B0 0B1

``routes`` gives the rank of each stage, route by route; ``microbatches`` the route of each micro-batch; ``share`` the
part of a whole micro-batch, where it is not 1; ``versions`` the updates whose weights each micro-batch takes, where an
asynchronous schedule says so. Blank lines and lines that begin with # mean nothing; a rank without
actions is written as ``-``. Without ``routes`` each stage lives on the rank whose row names it.
"""

import json
import re
from collections.abc import Sequence

from chimera.errors import FormatError, nearest_names
from chimera.ir.action import Instruction, flatten, parse_program
from chimera.ir.collector import collector_paused
from chimera.ir.inferred import inferred_schedule, require_all_numbers
from chimera.ir.schedule import Placement, Schedule

__all__ = ["from_text", "to_text"]

_HEAD = re.compile(r"([A-Za-z_]+)\s*:\s*(.*)", re.ASCII)
_NUMBERS = re.compile(r"\d{1,9}(?:\s+\d{1,9})*", re.ASCII)
_KEYS = ("name", "routes", "microbatches", "share", "versions")
_IDLE = "-"
_MAX_NAME = 200


def to_text(schedule: Schedule) -> str:
    """Write the head and the rows; ``from_text`` gives an equal schedule."""
    head = [
        f"name: {json.dumps(schedule.name, ensure_ascii=False)}",
        "routes: " + " | ".join(" ".join(map(str, route)) for route in schedule.placement.routes),
        "microbatches: " + " ".join(map(str, schedule.microbatch_to_route)),
    ]
    if schedule.microbatch_share != 1:
        head.append(f"share: {schedule.microbatch_share!r}")
    if schedule.microbatch_to_version is not None:
        head.append("versions: " + " ".join(map(str, schedule.microbatch_to_version)))
    return "\n".join([*head, *(row or _IDLE for row in schedule.to_text())]) + "\n"


def from_text(text: str, name: str = "text") -> Schedule:
    """Read a schedule; ``name`` serves where the head has none.

    Raises:
        FormatError: naming the line, or the row and column of the action.
    """
    head, rows = _split(text)
    with collector_paused():
        programs = [() if row == _IDLE else parse_program(row, number) for number, row in enumerate(rows)]
        if "name" in head:
            name = _name(head["name"])
        if "routes" not in head:
            for key in ("microbatches", "share", "versions"):
                if key in head:
                    raise FormatError(f"{key}: is given without routes:; add the rank of each stage, as in routes: 0 1")
            return inferred_schedule(name, programs)
        return _stated(name, head, programs)


def _split(text: str) -> tuple[dict[str, str], list[str]]:
    head: dict[str, str] = {}
    rows: list[str] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _HEAD.fullmatch(line)
        if match is None:
            rows.append(line)
            continue
        key, value = match.groups()
        if key not in _KEYS:
            raise FormatError(
                f"line {number}: unknown key {key[:60]!r}{nearest_names(key[:60], _KEYS)}; known: {', '.join(_KEYS)}"
            )
        if key in head:
            raise FormatError(f"line {number}: {key}: is given twice; leave one")
        if rows:
            raise FormatError(f"line {number}: {key}: stands behind the first row; move it to the head")
        head[key] = value
    return head, rows


def _stated(name: str, head: dict[str, str], programs: Sequence[tuple[Instruction, ...]]) -> Schedule:
    routes = tuple(_numbers(route, "routes") for route in head["routes"].split("|"))
    if "microbatches" in head:
        microbatches = _numbers(head["microbatches"], "microbatches")
    else:
        if len(routes) > 1:
            raise FormatError("microbatches: is missing; needed with several routes: the route of each micro-batch")
        named = {a.microbatch for program in programs for a in flatten(program) if a.microbatch is not None}
        require_all_numbers(named, "micro-batch")
        microbatches = (0,) * len(named)
    for rank in {rank for route in routes for rank in route}:
        if rank >= len(programs):
            raise FormatError(f"routes: name rank {rank}, but there are {len(programs)} rows; write - for an idle rank")
    if len({len(route) for route in routes}) > 1:
        raise FormatError(
            f"routes: have {', '.join(str(len(r)) for r in routes)} stages; all must place the same number"
        )
    for microbatch, route in enumerate(microbatches):
        if route >= len(routes):
            raise FormatError(f"microbatches: put micro-batch {microbatch} on route {route} of {len(routes)}")
    share, versions = _share(head.get("share", "1")), None
    if "versions" in head:
        versions = _numbers(head["versions"], "versions")
        if len(versions) != len(microbatches):
            raise FormatError(
                f"versions: has {len(versions)} numbers for {len(microbatches)} micro-batches; give as many"
            )
    return Schedule(name, Placement(len(programs), routes), microbatches, tuple(programs), share, versions)


def _numbers(text: str, key: str) -> tuple[int, ...]:
    text = text.strip()
    if not _NUMBERS.fullmatch(text):
        raise FormatError(f"{key}: {text[:60]!r} is no list of numbers; needed: as in {key}: 0 1 2 3")
    return tuple(map(int, text.split()))


def _name(value: str) -> str:
    try:
        name = json.loads(value)
    except (ValueError, RecursionError):
        name = None
    if type(name) is not str or not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
        raise FormatError(
            f"name: {value[:60]!r} is no name; needed: 1 to {_MAX_NAME} printable characters in double quotes"
        )
    return name


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise FormatError(f"share: {value[:60]!r} is no part of a micro-batch; needed: a number above 0, at most 1")
    return share
