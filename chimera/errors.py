"""Every error a user can meet, as one tree.

The messages say what was got, what is needed, which option to set and what to try. Each class carries the exit code
that a command ends with; anything that is not a ``ChimeraError`` is a fault of ours.

::

    ChimeraError                     1
    ├── UsageError                   2   wrong option, argument or configuration
    │   ├── ConfigError              2   a configuration file or an override
    │   └── FormatError              2   a file that cannot be read as what it claims to be
    ├── ScheduleError                2   a schedule that is incomplete, out of order, stuck or over its cap
    ├── InfeasibleError              3   well-formed, but nothing satisfies it
    ├── DataError                    1   a corpus or vocabulary that cannot be used
    ├── CheckpointError              1   a checkpoint that is missing, broken or of another layout
    └── RunError                     1   a step that failed: a dead or stalled rank, a loss that is not finite
        ├── StalledError             1
        └── NonFiniteError           1
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "CheckpointError",
    "ChimeraError",
    "ConfigError",
    "DataError",
    "FormatError",
    "InfeasibleError",
    "NonFiniteError",
    "RunError",
    "ScheduleError",
    "StalledError",
    "UsageError",
    "nearest_names",
]


class ChimeraError(Exception):
    """Base of all errors a user can cause or meet; ``exit_code`` is what a command returns."""

    exit_code: ClassVar[int] = 1


class UsageError(ChimeraError):
    """A wrong option or argument."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file or override that cannot be used."""


class FormatError(UsageError):
    """A file that is not what it claims to be; the message gives the place in it."""


class ScheduleError(ChimeraError):
    """A schedule that is incomplete, out of order, stuck, or over its memory cap."""

    exit_code = 2


class InfeasibleError(ChimeraError):
    """A well-formed question without an answer; search catches it and counts the reason."""

    exit_code = 3


class DataError(ChimeraError):
    """A corpus or vocabulary that cannot be used."""


class CheckpointError(ChimeraError):
    """A checkpoint that is missing, damaged or made under another layout."""


class RunError(ChimeraError):
    """A step that failed while running."""


class StalledError(RunError):
    """A rank waited longer than the time-out, or its peer died."""


class NonFiniteError(RunError):
    """The loss or the gradient norm is not a finite number."""


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x' or 'y'?)"`` for the known names closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
