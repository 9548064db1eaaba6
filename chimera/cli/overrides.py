"""The options of a configuration file as options of a command, with the help text that their dataclasses have."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from tyro.conf import arg

from chimera.train.config_file import SECTIONS, section_classes, section_types, type_text

__all__ = ["Overrides", "given_overrides"]


@cache
def _overrides_of(section: str) -> type[Any]:
    """Return a dataclass with an optional text for each option of a section, and the section's own help."""
    help_of: dict[str, str] = {}
    fields: dict[str, list[dataclasses.Field[Any]]] = {}
    for class_ in section_classes(section):
        help_of |= _attribute_help(class_)
        for option in dataclasses.fields(class_):
            fields.setdefault(option.name, []).append(option)
    options = [
        (
            name,
            Annotated[
                str | None,
                arg(
                    constructor=str,
                    metavar=type_text(section, name),
                    help=help_of[name],
                    help_behavior_hint=_default_hint(found),
                ),
            ],
            dataclasses.field(default=None),
        )
        for name, found in fields.items()
    ]
    made: type[Any] = dataclasses.make_dataclass(
        f"{section.title()}Overrides",
        options,
        frozen=True,
        namespace={"__doc__": f"The section [{section}] of the file.", "__module__": __name__},
    )
    return made


def _attribute_help(type_: type[Any]) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say of each attribute, in one line."""
    found: dict[str, str] = {}
    for base in reversed(type_.__mro__):
        text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for match in re.finditer(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE):
            found |= dict.fromkeys(match[1].split(", "), re.sub(r"\s+", " ", match[2]).replace("``", ""))
    return found


def _default_hint(options: "Sequence[dataclasses.Field[Any]]") -> str:
    """Return the default of an option, which families may have different ones of."""
    defaults = dict.fromkeys(option.default for option in options)
    if len(defaults) > 1:
        return "(default: by family)"
    (default,) = defaults
    if default is dataclasses.MISSING or default is None:
        return ""
    return f"(default: {str(default).lower() if isinstance(default, bool) else default})"


Overrides: Any = dataclasses.make_dataclass(
    "Overrides",
    [(name, _overrides_of(name), dataclasses.field(default_factory=_overrides_of(name))) for name in SECTIONS],
    frozen=True,
)
"""Options of ``chimera train`` that stand in for those of the file."""


def given_overrides(overrides: Any) -> Mapping[str, str]:
    """Return the options of a configuration that were set on the command line, by section.key."""
    return {
        f"{section}.{name}": value
        for section in SECTIONS
        for name in section_types(section)
        if (value := getattr(getattr(overrides, section), name)) is not None
    }
