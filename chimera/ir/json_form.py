"""The JSON form of a schedule, the interchange format: it carries every route and is kept stable.

The file may come from a hostile hand: keys, types and ranges are all checked, nothing is guessed, and an error names
the program (row) and action (column). Whether the schedule is complete or gets stuck is asked in ``checks``.
"""

import json
from typing import Any

from chimera.errors import FormatError, nearest_names
from chimera.ir.action import WHOLE_STAGE, Action, Instruction, Kind, Overlap
from chimera.ir.collector import collector_paused
from chimera.ir.files import check_keys, parse_json_object, shown
from chimera.ir.schedule import Placement, Schedule

__all__ = ["FORMAT", "VERSION", "from_json", "to_json"]

FORMAT = "chimera-schedule"
VERSION = 1

_PAIR = "OVERLAP_F_B"
_COUNTS = ("num_stages", "num_ranks", "num_microbatches")
_REQUIRED = ("name", *_COUNTS, "pipelines", "microbatch_to_pipeline", "programs")
_OPTIONAL = ("microbatch_share", "microbatch_to_version")
_ACTION_KEYS = ("kind", "stage", "microbatch", "pipeline")
_KINDS = {kind.name: kind for kind in Kind}
_MICROBATCH_KINDS = {name: kind for name, kind in _KINDS.items() if kind not in WHOLE_STAGE}
_MAX_NAME = 200


def from_json(text: str) -> Schedule:
    """Read a schedule.

    Raises:
        FormatError: the text is anything but a whole, consistent schedule.
    """
    with collector_paused():
        data = parse_json_object(text, format_name=FORMAT, version=VERSION)
        check_keys(data, required=_REQUIRED, optional=_OPTIONAL, where="the schedule")
        placement = _placement(data)
        route = _routes_of_microbatches(data, len(placement.routes))
        reader = _ProgramReader(placement, route)
        programs = _list(data["programs"], "programs", placement.num_ranks, "num_ranks")
        actions = tuple(reader.program(row, program) for row, program in enumerate(programs))
        share, version = _share(data.get("microbatch_share", 1)), _versions_of_microbatches(data)
        return Schedule(_name(data["name"]), placement, route, actions, share, version)


def to_json(schedule: Schedule) -> str:
    """Write a schedule, one action a line; ``microbatch_share`` only where it is not 1, versions where there are any.

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
    if schedule.microbatch_to_version is not None:
        head["microbatch_to_version"] = list(schedule.microbatch_to_version)
    members = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    first_route = {
        (rank, stage): route
        for route, ranks in reversed(list(enumerate(placement.routes)))
        for stage, rank in enumerate(ranks)
    }
    programs = [_program_text(schedule, rank, first_route) for rank in range(schedule.num_ranks)]
    members.append(' "programs": [\n' + ",\n".join(programs) + "\n ]")
    return "{\n" + ",\n".join(members) + "\n}\n"


def _program_text(schedule: Schedule, rank: int, first_route: dict[tuple[int, int], int]) -> str:
    """Write one rank's program; ``first_route`` gives, per (rank, stage), the first route that puts the stage there."""
    route = schedule.microbatch_to_route

    def action_text(action: Action) -> str:
        kind, stage, microbatch = action
        if microbatch is None:
            pipeline = json.dumps(first_route.get((rank, stage)))
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


def _integer(value: Any, where: str, low: int, high: int | None = None) -> int:
    """Return ``value`` if it is an integer in low…high, both ends in; True and 1.0 are none."""
    if type(value) is not int or value < low or (high is not None and value > high):
        needed = f"an integer of at least {low}" if high is None else f"an integer in {low}…{high}"
        raise FormatError(f"{where} is {shown(value)}; needed: {needed}")
    return value


def _list(value: Any, where: str, length: int, length_key: str) -> list[Any]:
    if type(value) is not list:
        raise FormatError(f'"{where}" is {shown(value)}; needed: a list')
    if len(value) != length:
        raise FormatError(f'"{where}" has {len(value)} entries, but "{length_key}" is {length}; they must agree')
    return value


def _placement(data: dict[str, Any]) -> Placement:
    stages, ranks, _ = (_integer(data[key], f'"{key}"', 1) for key in _COUNTS)
    pipelines = data["pipelines"]
    if type(pipelines) is not list or not pipelines:
        raise FormatError(f'"pipelines" is {shown(pipelines)}; needed: a list of at least one pipeline')
    routes = []
    for number, pipeline in enumerate(pipelines):
        where = f"pipeline {number}"
        if type(pipeline) is not dict:
            raise FormatError(f'{where} is {shown(pipeline)}; needed: {{"stage_to_rank": […]}}')
        check_keys(pipeline, required=("stage_to_rank",), optional=(), where=where)
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


def _versions_of_microbatches(data: dict[str, Any]) -> tuple[int, ...] | None:
    if "microbatch_to_version" not in data:
        return None
    listed = _list(data["microbatch_to_version"], "microbatch_to_version", data["num_microbatches"], "num_microbatches")
    return tuple(
        _integer(version, f"the version of micro-batch {microbatch}", 0) for microbatch, version in enumerate(listed)
    )


def _name(value: Any) -> str:
    if type(value) is not str or not value.isprintable() or not 0 < len(value) <= _MAX_NAME:
        raise FormatError(f'"name" is {shown(value)}; needed: 1 to {_MAX_NAME} printable characters')
    return value


def _share(value: Any) -> float:
    if type(value) not in {int, float} or not 0 < value <= 1:
        raise FormatError(f'"microbatch_share" is {shown(value)}; needed: a number above 0, at most 1')
    return float(value)


class _ProgramReader:
    """Reads programs against one placement; well-formed actions take a short path, all others the explaining one."""

    def __init__(self, placement: Placement, route: tuple[int, ...]) -> None:
        self._placement = placement
        self._route = route

    def program(self, row: int, program: Any) -> tuple[Instruction, ...]:
        if type(program) is not list:
            raise FormatError(f"program {row} is {shown(program)}; needed: a list of actions")
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
            raise FormatError(f'{where} is {shown(entry)}; needed: {{"kind": …, "stage": …, …}}')
        if entry.get("kind") != _PAIR:
            return self._action(entry, row, where)
        check_keys(entry, required=("kind", "actions"), optional=(), where=where)
        parts = _list(entry["actions"], f"actions of the pair at {where}", 2, "a pair")
        for part in parts:
            if type(part) is not dict:
                raise FormatError(f'{where} pairs {shown(part)}; needed: {{"kind": …, "stage": …, …}}')
        forward, backward = (self._action(part, row, where) for part in parts)
        pair = Overlap(forward, backward)
        if pair.fault is not None:
            raise FormatError(f"{where} {pair.fault}")
        return pair

    def _action(self, entry: dict[str, Any], row: int, where: str) -> Action:
        name = entry.get("kind")
        if type(name) is not str or name not in _KINDS:
            known = (*_KINDS, _PAIR)
            hint = nearest_names(name[:_MAX_NAME], known) if type(name) is str else ""
            raise FormatError(f"{where}: kind is {shown(name)}{hint}; needed: one of {', '.join(known)}")
        kind = _KINDS[name]
        if kind in WHOLE_STAGE:
            return self._whole_stage(kind, entry, row, where)
        check_keys(entry, required=_ACTION_KEYS, optional=(), where=where)
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
        check_keys(entry, required=_ACTION_KEYS[:3], optional=_ACTION_KEYS[3:], where=where)
        stage = _integer(entry["stage"], f"{where}: stage", 0, self._placement.num_stages - 1)
        if entry["microbatch"] is not None:
            got = shown(entry["microbatch"])
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
