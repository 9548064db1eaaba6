"""Costs files: ``StageCosts`` as strict JSON, keys named as its fields.

``{"format": "chimera-costs", "version": 1, "forward_s": [...], "backward_s": [...], ...}``; the keys with one number
per stage, ``message_bytes`` and ``message_s`` with one per boundary, ``latency_s``, ``bandwidth_bytes_per_s``, and
``overlap_s`` as a list of ``{"forward": 0, "backward": 1, "kind": "B", "seconds": 0.03}``. What the numbers mean stands
in ``ir.costs``.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from chimera.errors import FormatError, UsageError
from chimera.ir.action import Kind
from chimera.ir.costs import PER_BOUNDARY_FIELDS, PER_STAGE_FIELDS, PairTime, StageCosts
from chimera.ir.files import check_keys, read_json_object, replacing, shown

__all__ = ["read_costs", "write_costs"]

_FORMAT: Final = "chimera-costs"
_VERSION: Final = 1
_LISTS: Final = frozenset({*PER_STAGE_FIELDS, *PER_BOUNDARY_FIELDS})
_REQUIRED: Final = {"forward_s", "backward_s"}


def read_costs(path: str | Path) -> StageCosts:
    """Read a costs file.

    Raises:
        FormatError: the file is not strict JSON of this format, or a number in it is missing, negative or not finite.
    """
    data = read_json_object(path, format_name=_FORMAT, version=_VERSION)
    check_keys(
        data, required=_REQUIRED, optional={field.name for field in fields(StageCosts)} - _REQUIRED, where=str(path)
    )
    for name in _LISTS & data.keys():
        if not isinstance(data[name], list):
            raise FormatError(f"{path}: {name} is {shown(data[name])}; needed: a list of numbers")
    pairs = data.pop("overlap_s", [])
    if not isinstance(pairs, list):
        raise FormatError(f"{path}: overlap_s is {shown(pairs)}; needed: a list of pairs")
    overlap = [_read_pair(pair, f"{path}: overlap_s[{index}]") for index, pair in enumerate(pairs)]
    try:
        return StageCosts(**data, overlap_s=overlap)
    except UsageError as error:
        raise FormatError(f"{path}: {error}") from error


def write_costs(costs: StageCosts, path: str | Path) -> None:
    """Write ``costs``; what is at its default is left out. The file appears whole or not at all."""
    data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    for field in fields(costs):
        value = getattr(costs, field.name)
        if field.name == "overlap_s":
            value = [{**pair._asdict(), "kind": pair.kind.name} for pair in value]
        elif field.name in _LISTS and value is not None:
            value = [float(x) for x in value]
        if value is not None and value != []:
            data[field.name] = value
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _read_pair(data: Any, where: str) -> PairTime:
    if not isinstance(data, dict):
        raise FormatError(
            f'{where} is {shown(data)}; needed: {{"forward": 0, "backward": 1, "kind": "B", "seconds": 0.03}}'
        )
    check_keys(data, required={"forward", "backward", "kind", "seconds"}, optional=set(), where=where)
    for name in ("forward", "backward"):
        if isinstance(data[name], bool) or not isinstance(data[name], int):
            raise FormatError(f"{where}: {name} is {shown(data[name])}; needed: a stage number")
    if not isinstance(data["kind"], str) or data["kind"] not in {"B", "I"}:
        raise FormatError(f'{where}: kind is {shown(data["kind"])}; needed: "B" or "I"')
    return PairTime(data["forward"], data["backward"], Kind[data["kind"]], data["seconds"])
