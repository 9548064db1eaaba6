"""Options that name a place in a configuration, ``--section.key value``: taken out before the others are parsed.

It knows no section and no key: whoever reads the configuration does, and names the nearest one for a misspelt one.
"""

import re
from collections.abc import Mapping, Sequence

from tyro.conf import Fixed, Suppress

from chimera.errors import UsageError

__all__ = ["Overrides", "split_overrides"]

Overrides = Suppress[Fixed[Mapping[str, str]]]
"""The type of a command's keyword ``overrides``: the texts by ``section.key``; it is no option of its own."""

_OVERRIDE = re.compile(r"--([A-Za-z][\w-]*\.[\w.-]+)(?:=(.*))?", re.ASCII | re.DOTALL)


def split_overrides(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the overrides in ``words``, with underscores for the dashes of their names, and the words that are left.

    >>> split_overrides(["tiny.toml", "--run.steps", "20", "--json", "--runtime.timeout-s=5"])
    ({'run.steps': '20', 'runtime.timeout_s': '5'}, ['tiny.toml', '--json'])

    Raises:
        UsageError: an override has no value, or stands twice.
    """
    overrides: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        name, value = match[1].replace("-", "_"), match[2]
        if value is None:
            value = next(left, None)
        if value is None or (match[2] is None and value.startswith("--")):
            raise UsageError(f"{word} has no value; needed: {word} VALUE")
        if name in overrides:
            raise UsageError(f"--{match[1]} is given twice, as {overrides[name]!r} and {value!r}; leave one out")
        overrides[name] = value
    return overrides, rest
