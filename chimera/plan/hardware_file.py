"""Device and code-base files: strict JSON, units in the keys, found by name or by path.

The package's devices are the files of ``hardware/``, its code bases those of ``plan/codebases/``; a path ending in
``.json`` names any other. A file that is not whole is refused with the key at fault. What the numbers mean stands in
``hardware`` and ``software``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from chimera.errors import FormatError, UsageError, nearest_names
from chimera.ir.files import check_keys, parse_json_object, read_text, replacing, shown
from chimera.plan.hardware import DEVICE_CONSTANTS, DTYPES, FURTHER_CONSTANTS, Constant, Device, Link
from chimera.plan.software import SOFTWARE_CONSTANTS, Software

__all__ = [
    "known_devices",
    "known_software",
    "read_device",
    "read_software",
    "write_device",
    "write_software",
]

_DEVICE: Final = "chimera-device"
_SOFTWARE: Final = "chimera-software"
_VERSION: Final = 1


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices that the package knows."""
    return _names(_hardware())


def known_software() -> tuple[str, ...]:
    """Return the names of the code bases that the package knows."""
    return _names(_codebases())


def read_device(name: str | Path) -> Device:
    """Read a device by its name, or from the file at a path ending in ``.json``.

    Raises:
        UsageError: no device has this name; the message gives the nearest.
        FormatError: the file is not a whole device.
    """
    text, where = _text_of(name, _hardware(), "device", "--device")
    data = _parsed(text, _DEVICE, where)
    keys = {field.name for field in fields(Device)}
    check_keys(data, required=keys, optional=set(), where=where)
    matrix = _mapping(data, "matrix_flops_per_s", where)
    check_keys(matrix, required=set(DTYPES), optional=set(), where=f"{where}: matrix_flops_per_s")
    constants = _mapping(data, "constants", where)
    check_keys(constants, required=set(DEVICE_CONSTANTS), optional=set(FURTHER_CONSTANTS), where=f"{where}: constants")
    links = data["links"]
    if not isinstance(links, list) or not links:
        raise FormatError(f"{where}: links is {shown(links)}; needed: a list, the innermost link first")
    return Device(
        name=_string(data, "name", where),
        title=_string(data, "title", where),
        memory_bytes=int(_number(data, "memory_bytes", where)),
        memory_bytes_per_s=_number(data, "memory_bytes_per_s", where),
        cache_bytes=int(_number(data, "cache_bytes", where)),
        multiprocessors=int(_number(data, "multiprocessors", where)),
        matrix_flops_per_s={key: _number(matrix, key, f"{where}: matrix_flops_per_s") for key in matrix},
        vector_flops_per_s=_number(data, "vector_flops_per_s", where),
        links=tuple(_link(link, f"{where}: links[{index}]") for index, link in enumerate(links)),
        adapters_per_node=int(_number(data, "adapters_per_node", where)),
        constants=_constants(data, where),
        sources=_sources(data, where),
    )


def write_device(device: Device, path: str | Path) -> None:
    """Write a device; the file appears whole or not at all."""
    _write(_DEVICE, asdict(replace(device, constants=dict(device.constants))), path)


def read_software(name: str | Path) -> Software:
    """Read a code base by its name, or from the file at a path ending in ``.json``.

    Raises:
        UsageError: no code base has this name; the message gives the nearest.
        FormatError: the file is not a whole one.
    """
    text, where = _text_of(name, _codebases(), "code base", "--software")
    data = _parsed(text, _SOFTWARE, where)
    check_keys(data, required={field.name for field in fields(Software)}, optional=set(), where=where)
    dtype = data["dtype"]
    if dtype not in DTYPES:
        raise FormatError(f"{where}: dtype is {shown(dtype)}; needed: one of {', '.join(DTYPES)}")
    constants = _mapping(data, "constants", where)
    check_keys(constants, required=set(), optional=set(SOFTWARE_CONSTANTS), where=f"{where}: constants")
    multiple, given = data["vocab_multiple"], data["message_bytes_per_s"]
    for key in ("fused_attention", "overlaps_reduction"):
        if not isinstance(data[key], bool):
            raise FormatError(f"{where}: {key} is {shown(data[key])}; needed: true or false")
    return Software(
        name=_string(data, "name", where),
        title=_string(data, "title", where),
        dtype=dtype,
        vocab_multiple=None if multiple is None else int(_number(data, "vocab_multiple", where)),
        fused_attention=data["fused_attention"],
        gradient_bytes=_number(data, "gradient_bytes", where),
        reduced_bytes=_number(data, "reduced_bytes", where),
        accumulated_bytes=_number(data, "accumulated_bytes", where, or_zero=True),
        overlaps_reduction=data["overlaps_reduction"],
        message_bytes_per_s=None if given is None else _number(data, "message_bytes_per_s", where),
        constants=_constants(data, where),
        sources=_sources(data, where),
    )


def write_software(software: Software, path: str | Path) -> None:
    """Write a code base; the file appears whole or not at all."""
    _write(_SOFTWARE, asdict(replace(software, constants=dict(software.constants))), path)


def _hardware() -> Traversable:
    """Return the folder of devices: in the installed package, or beside the package in a checkout."""
    package = resources.files("chimera")
    installed = package / "hardware"
    return installed if installed.is_dir() else Path(str(package)).parent / "hardware"


def _codebases() -> Traversable:
    return resources.files("chimera.plan") / "codebases"


def _names(folder: Traversable) -> tuple[str, ...]:
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


def _text_of(name: str | Path, folder: Traversable, what: str, option: str) -> tuple[str, str]:
    """Return the text of a file given by name or path, and how to call it in messages."""
    if str(name).endswith(".json"):
        return read_text(name, f"{what} file"), str(name)
    known = _names(folder)
    if str(name) not in known:
        raise UsageError(
            f"{option} {name}: no {what} has this name{nearest_names(str(name), known)}; known: {', '.join(known)}; "
            "or give a file ending in .json"
        )
    return (folder / f"{name}.json").read_text(encoding="utf-8"), f"{name}.json"


def _parsed(text: str, format_name: str, where: str) -> dict[str, Any]:
    try:
        return parse_json_object(text, format_name=format_name, version=_VERSION)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def _write(format_name: str, data: Mapping[str, Any], path: str | Path) -> None:
    document = {"format": format_name, "version": _VERSION, **data}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _constants(data: Mapping[str, Any], where: str) -> dict[str, Constant]:
    made = {}
    for name in (constants := _mapping(data, "constants", where)):
        place = f"{where}: constants.{name}"
        entry = _mapping(constants, name, f"{where}: constants")
        check_keys(entry, required={field.name for field in fields(Constant)}, optional=set(), where=place)
        made[name] = Constant(
            value=_number(entry, "value", place),
            unit=_string(entry, "unit", place),
            low=_number(entry, "low", place),
            high=_number(entry, "high", place),
            fitted_on=_string(entry, "fitted_on", place),
        )
    return made


def _link(data: Any, where: str) -> Link:
    if not isinstance(data, dict):
        raise FormatError(f"{where} is {shown(data)}; needed: an object")
    check_keys(data, required={field.name for field in fields(Link)}, optional=set(), where=where)
    return Link(
        name=_string(data, "name", where),
        devices=None if data["devices"] is None else int(_number(data, "devices", where)),
        bytes_per_s=_number(data, "bytes_per_s", where),
        latency_s=_number(data, "latency_s", where),
    )


def _mapping(data: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = data[key]
    if not isinstance(value, dict):
        raise FormatError(f"{where}: {key} is {shown(value)}; needed: an object")
    return value


def _string(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data[key]
    if not isinstance(value, str) or not value:
        raise FormatError(f"{where}: {key} is {shown(value)}; needed: a text")
    return value


def _number(data: Mapping[str, Any], key: str, where: str, *, or_zero: bool = False) -> float:
    value = data[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not or_zero):
        raise FormatError(f"{where}: {key} is {shown(value)}; needed: a number {'from' if or_zero else 'above'} 0")
    return float(value)


def _sources(data: Mapping[str, Any], where: str) -> tuple[str, ...]:
    value = data["sources"]
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise FormatError(f"{where}: sources is {shown(value)}; needed: a list of texts, where each figure comes from")
    return tuple(value)
