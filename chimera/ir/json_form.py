"""The JSON form of a schedule, the interchange format: it carries every route and is kept stable.

The file may come from a hostile hand: keys, types and ranges are all checked, nothing is guessed, and an error names
the program (row) and action (column). Whether the schedule is complete or gets stuck is asked in ``checks``.
"""

import json
from reprlib import Repr
from typing import Any

from chimera.errors import FormatError, nearest_names
from chimera.ir.action import WHOLE_STAGE, Action, Instruction, Kind, Overlap
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Placement, Schedule

__all__ = ["FORMAT", "VERSION", "from_json", "to_json"]

FORMAT = "chimera-schedule"
VERSION = 1

_PAIR = "OVERLAP_F_B"
_COUNTS = ("num_stages", "num_ranks", "num_microbatches")
_REQUIRED = ("format", "version", "name", *_COUNTS, "pipelines", "microbatch_to_pipeline", "programs")
_OPTIONAL = ("microbatch_share",)
_ACTION_KEYS = ("kind", "stage", "microbatch", "pipeline")
_KINDS = {kind.name: kind for kind in Kind}
_MICROBATCH_KINDS = {name: kind for name, kind in _KINDS.items() if kind not in WHOLE_STAGE}
_MAX_NAME = 200

_shorten = Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60


def from_json(text: str) -> Schedule:
    """Read a schedule.

    Raises:
        FormatError: the text is anything but a whole, consistent schedule.
    """
    with collector_paused():
        data = _loads(text)
        placement = _placement(data)
        route = _routes_of_microbatches(data, len(placement.routes))
        reader = _ProgramReader(placement, route)
        programs = _list(data["programs"], "programs", placement.num_ranks, "num_ranks")
        actions = tuple(reader.program(row, program) for row, program in enumerate(programs))
        return Schedule(_name(data["name"]), placement, route, actions, _share(data.get("microbatch_share", 1)))


def to_json(schedule: Schedule) -> str:
    """Write a schedule, one action a line; ``microbatch_share`` only where it is not 1.

    REDUCE_GRAD and STEP have no micro-batch; their pipeline is the first that puts the stage on the rank.
    """
    placement = schedule.placement
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "num_stages": schedule.num_stages,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "pipelines": [{"stage_to_rank": list(ranks)} for ranks in placement.routes],
        "microbatch_to_pipeline": list(schedule.microbatch_to_route),
    }
    if schedule.microbatch_share != 1:
        head["microbatch_share"] = schedule.microbatch_share
    members = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    programs = [_program_text(schedule, rank) for rank in range(schedule.num_ranks)]
    members.append(' "programs": [\n' + ",\n".join(programs) + "\n ]")
    return "{\n" + ",\n".join(members) + "\n}\n"


def _program_text(schedule: Schedule, rank: int) -> str:
    route = schedule.microbatch_to_route
    local = {
        stage: next(r for r, ranks in enumerate(schedule.placement.routes) if ranks[stage] == rank)
        for stage in schedule.placement.stages_on(rank)
    }

    def action_text(action: Action) -> str:
        kind, stage, microbatch = action
        if microbatch is None:
            pipeline = json.dumps(local.get(stage))
            return f'{{"kind": "{kind.name}", "stage": {stage}, "microbatch": null, "pipeline": {pipeline}}}'
        number = route[microbatch]
        return f'{{"kind": "{kind.name}", "stage": {stage}, "microbatch": {microbatch}, "pipeline": {number}}}'

    lines = [
        f'{{"kind": "{_PAIR}", "actions": [{action_text(i.forward)}, {action_text(i.backward)}]}}'
        if type(i) is Overlap
        else action_text(i)  # type: ignore[arg-type]  # the other member of the union
        for i in schedule.actions[rank]
    ]
    return "  [\n   " + ",\n   ".join(lines) + "\n  ]" if lines else "  []"


def _loads(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise FormatError("the JSON is nested far too deeply for a schedule") from None
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error
    if type(data) is not dict or data.get("format") != FORMAT:
        got = data.get("format") if type(data) is dict else data
        raise FormatError(f'not a schedule: got "format" {_shorten.repr(got)}; needed: an object with "{FORMAT}"')
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise FormatError(f'"version" is {_shorten.repr(data.get("version"))}; this program reads version {VERSION}')
    _check_keys(data, _REQUIRED, _OPTIONAL, "the schedule")
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"an object gives the key {_shorten.repr(repeated)} twice; leave one")
    return data


def _refuse_constant(name: str) -> float:
    raise FormatError(f"{name} is not a JSON number")


def _check_keys(data: dict[str, Any], required: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in required and key not in optional:
            hint = nearest_names(key[:_MAX_NAME], (*required, *optional))
            raise FormatError(f"{where}: unknown key {_shorten.repr(key)}{hint}")
    for key in required:
        if key not in data:
            raise FormatError(f"{where}: the key {key!r} is missing")


def _integer(value: Any, where: str, low: int, high: int | None = None) -> int:
    """Return ``value`` if it is an integer in low…high, both ends in; True and 1.0 are none."""
    if type(value) is not int or value < low or (high is not None and value > high):
        needed = f"an integer of at least {low}" if high is None else f"an integer in {low}…{high}"
        raise FormatError(f"{where} is {_shorten.repr(value)}; needed: {needed}")
    return value


def _list(value: Any, where: str, length: int, length_key: str) -> list[Any]:
    if type(value) is not list:
        raise FormatError(f'"{where}" is {_shorten.repr(value)}; needed: a list')
    if len(value) != length:
        raise FormatError(f'"{where}" has {len(value)} entries, but "{length_key}" is {length}; they must agree')
    return value


def _placement(data: dict[str, Any]) -> Placement:
    stages, ranks, _ = (_integer(data[key], f'"{key}"', 1) for key in _COUNTS)
    pipelines = data["pipelines"]
    if type(pipelines) is not list or not pipelines:
        raise FormatError(f'"pipelines" is {_shorten.repr(pipelines)}; needed: a list of at least one pipeline')
    routes = []
    for number, pipeline in enumerate(pipelines):
        where = f"pipeline {number}"
        if type(pipeline) is not dict:
            raise FormatError(f'{where} is {_shorten.repr(pipeline)}; needed: {{"stage_to_rank": […]}}')
        _check_keys(pipeline, ("stage_to_rank",), (), where)
        stage_to_rank = _list(pipeline["stage_to_rank"], f"stage_to_rank of {where}", stages, "num_stages")
        routes.append(
            tuple(
                _integer(rank, f"{where}: the rank of stage {stage}", 0, ranks - 1)
                for stage, rank in enumerate(stage_to_rank)
            )
        )
    return Placement(ranks, tuple(routes))


def _routes_of_microbatches(data: dict[str, Any], num_routes: int) -> tuple[int, ...]:
    listed = _list(
        data["microbatch_to_pipeline"], "microbatch_to_pipeline", data["num_microbatches"], "num_microbatches"
    )
    return tuple(
        _integer(route, f"the pipeline of micro-batch {microbatch}", 0, num_routes - 1)
        for microbatch, route in enumerate(listed)
    )


def _name(value: Any) -> str:
    if type(value) is not str or not value.isprintable() or not 0 < len(value) <= _MAX_NAME:
        raise FormatError(f'"name" is {_shorten.repr(value)}; needed: 1 to {_MAX_NAME} printable characters')
    return value


def _share(value: Any) -> float:
    if type(value) not in {int, float} or not 0 < value <= 1:
        raise FormatError(f'"microbatch_share" is {_shorten.repr(value)}; needed: a number above 0, at most 1')
    return float(value)


class _ProgramReader:
    """Reads programs against one placement; well-formed actions take a short path, all others the explaining one."""

    def __init__(self, placement: Placement, route: tuple[int, ...]) -> None:
        self._placement = placement
        self._route = route

    def program(self, row: int, program: Any) -> tuple[Instruction, ...]:
        if type(program) is not list:
            raise FormatError(f"program {row} is {_shorten.repr(program)}; needed: a list of actions")
        kinds, route, num_stages, num_microbatches = (
            _MICROBATCH_KINDS,
            self._route,
            self._placement.num_stages,
            len(self._route),
        )
        instructions: list[Instruction] = []
        for column, entry in enumerate(program):
            try:
                kind, stage, microbatch = kinds[entry["kind"]], entry["stage"], entry["microbatch"]
                pipeline = entry["pipeline"]
                plain = (
                    type(stage) is type(microbatch) is type(pipeline) is int
                    and 0 <= stage < num_stages
                    and 0 <= microbatch < num_microbatches
                    and route[microbatch] == pipeline
                    and len(entry) == 4
                )
            except (KeyError, TypeError):
                plain = False
            if plain:
                instructions.append(Action(kind, stage, microbatch))
            else:
                instructions.append(self._instruction(entry, row, f"program {row}, action {column}"))
        return tuple(instructions)

    def _instruction(self, entry: Any, row: int, where: str) -> Instruction:
        if type(entry) is not dict:
            raise FormatError(f'{where} is {_shorten.repr(entry)}; needed: {{"kind": …, "stage": …, …}}')
        if entry.get("kind") != _PAIR:
            return self._action(entry, row, where)
        _check_keys(entry, ("kind", "actions"), (), where)
        parts = _list(entry["actions"], f"actions of the pair at {where}", 2, "a pair")
        for part in parts:
            if type(part) is not dict:
                raise FormatError(f'{where} pairs {_shorten.repr(part)}; needed: {{"kind": …, "stage": …, …}}')
        forward, backward = (self._action(part, row, where) for part in parts)
        if forward.kind is not Kind.F or backward.kind not in {Kind.B, Kind.I}:
            raise FormatError(f"{where} pairs {forward} with {backward}; needed: an F, then a B or I")
        return Overlap(forward, backward)

    def _action(self, entry: dict[str, Any], row: int, where: str) -> Action:
        name = entry.get("kind")
        if type(name) is not str or name not in _KINDS:
            known = (*_KINDS, _PAIR)
            hint = nearest_names(name[:_MAX_NAME], known) if type(name) is str else ""
            raise FormatError(f"{where}: kind is {_shorten.repr(name)}{hint}; needed: one of {', '.join(known)}")
        kind = _KINDS[name]
        if kind in WHOLE_STAGE:
            return self._whole_stage(kind, entry, row, where)
        _check_keys(entry, _ACTION_KEYS, (), where)
        stage = _integer(entry["stage"], f"{where}: stage", 0, self._placement.num_stages - 1)
        microbatch = _integer(entry["microbatch"], f"{where}: microbatch", 0, len(self._route) - 1)
        pipeline = _integer(entry["pipeline"], f"{where}: pipeline", 0, len(self._placement.routes) - 1)
        if pipeline != self._route[microbatch]:
            raise FormatError(
                f"{where}: pipeline is {pipeline}, but microbatch_to_pipeline puts micro-batch {microbatch} on "
                f"{self._route[microbatch]}; they must agree"
            )
        return Action(kind, stage, microbatch)

    def _whole_stage(self, kind: Kind, entry: dict[str, Any], row: int, where: str) -> Action:
        _check_keys(entry, ("kind", "stage", "microbatch"), ("pipeline",), where)
        stage = _integer(entry["stage"], f"{where}: stage", 0, self._placement.num_stages - 1)
        if entry["microbatch"] is not None:
            got = _shorten.repr(entry["microbatch"])
            raise FormatError(f"{where}: microbatch of {kind.name} is {got}; needed: null, it concerns the whole stage")
        if (pipeline := entry.get("pipeline")) is not None:
            routes = self._placement.routes
            pipeline = _integer(pipeline, f"{where}: pipeline", 0, len(routes) - 1)
            if routes[pipeline][stage] != row:
                raise FormatError(
                    f"{where}: pipeline {pipeline} puts stage {stage} on rank {routes[pipeline][stage]}; "
                    "needed: null, or a pipeline that puts it here"
                )
        return Action(kind, stage, None)
