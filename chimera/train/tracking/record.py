"""The record of a run from its first start on: what was run, where, and what the time went into.

It stands in ``run.json``, is replaced as a whole, and goes on over restarts: each start adds an entry. Times are of the
first rank. What can be derived of it (shares, throughput) is derived here for every reader: the last lines of a run,
the trackers, ``chimera top``. How it is found out, and when it is written, is ``provenance``'s and ``tracking``'s.
"""

import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import ConfigDict

from chimera.errors import FormatError
from chimera.train.tracking.masking import Masker
from chimera.train.tracking.value_file import STRICT, read_value, write_value

__all__ = [
    "RECORD",
    "Origin",
    "RunRecord",
    "RunStart",
    "TrackerRecord",
    "end_of",
    "end_record",
    "read_record",
    "write_record",
]

RECORD: Final = "run.json"
_FORMAT: Final = "chimera-run"
_LONGEST_END: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a start came from; no secret is in it.

    Attributes:
        command: the words of the command.
        folder: the working directory.
        commit, dirty: of the git repository there, the latter whether tracked files differ from the commit; None
            where there is none.
        versions: of Python, chimera, torch and what it was built for, by name.
        environment: the variables that change how a run behaves.
        hosts: for each rank the name of its host.
        devices: for each rank where it computes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    command: tuple[str, ...]
    folder: str
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    environment: dict[str, str]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """One start of a run, the first or after a stop.

    Attributes:
        origin: where it came from.
        started_s: when its command started, in seconds of the system's clock.
        seen_s: when this was last written.
        from_step: steps that stood before it.
        step: steps that stand now.
        carried_s: seconds that the steps before it took on the whole, waiting for data apart.
        first_step_s: from the command's start to the end of its first step; None before that.
        steps_s: seconds of its steps, waiting for data apart.
        data_wait_s: seconds that its steps waited for micro-batches.
        evaluation_s: seconds of its evaluations.
        checkpoint_s: seconds of its saves.
        checkpoints: saves.
        tokens: positions of its steps, padding included.
        end: None while it goes on, as far as is known; "finished", "interrupted", or why it failed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    origin: Origin
    started_s: float
    seen_s: float
    from_step: int
    step: int
    carried_s: float
    first_step_s: float | None = None
    steps_s: float = 0.0
    data_wait_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoints: int = 0
    tokens: int = 0
    end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRecord:
    """What became of one tracker.

    Attributes:
        reference: what it calls this run, so that a restart goes on with it; None where it has no such name.
        lost_rows: rows that it did not take.
        first_failure: its first failure, without secrets; None for none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    reference: str | None = None
    lost_rows: int = 0
    first_failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run.

    Attributes:
        name: of the run, for readers.
        steps: that it is to make.
        config: every option by section and name, as run; no secret is in it.
        starts: at least one; the last is the present one.
        trackers: by name.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    steps: int
    config: dict[str, dict[str, Any]]
    starts: tuple[RunStart, ...]
    trackers: dict[str, TrackerRecord] = field(default_factory=dict)

    @property
    def last(self) -> RunStart:
        """The present start, or the last one."""
        return self.starts[-1]

    @property
    def wall_s(self) -> float:
        """Seconds from the first start to the last sign of life, over all restarts."""
        return max(0.0, self.last.seen_s - self.starts[0].started_s)

    @property
    def useful_s(self) -> float:
        """Seconds of the steps that stand; those of steps that a restart made again count once."""
        return self.last.carried_s + self.last.steps_s

    @property
    def effective_share(self) -> float:
        """Share of the wall time that went into steps that stand."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Positions of the present start's steps by their time, waiting for data included; None before the first."""
        busy = self.last.steps_s + self.last.data_wait_s
        return self.last.tokens / busy if busy else None

    @property
    def mean_step_s(self) -> float | None:
        """Mean seconds of the present start's steps, waiting for data included; None before the first."""
        steps = self.last.step - self.last.from_step
        return (self.last.steps_s + self.last.data_wait_s) / steps if steps else None

    def total(self, name: str) -> float:
        """Return the sum of a quantity over all starts."""
        return float(sum(getattr(start, name) for start in self.starts))

    def summary(self) -> dict[str, float | int | str]:
        """Return what the run came to so far, by name; what is not known yet is left out."""
        found: dict[str, float | int | str | None] = {
            "state": self.last.end or "running",
            "steps_done": self.last.step,
            "restarts": len(self.starts) - 1,
            "started_at": _iso(self.starts[0].started_s),
            "wall_s": self.wall_s,
            "time_to_first_step_s": self.starts[0].first_step_s,
            "tokens_per_s": self.tokens_per_s,
            "effective_share": self.effective_share,
            "useful_step_s": self.useful_s,
            "data_wait_s": self.total("data_wait_s"),
            "evaluation_s": self.total("evaluation_s"),
            "checkpoint_s": self.total("checkpoint_s"),
            "checkpoints": round(self.total("checkpoints")),
        }
        return {name: value for name, value in found.items() if value is not None}


def write_record(record: RunRecord, folder: Path) -> None:
    """Write a record into a run's folder, whole or not at all, with its summary for readers that derive nothing.

    Raises:
        OSError: the system cannot.
    """
    write_value(record, folder / RECORD, _FORMAT, summary=record.summary())


def read_record(folder: Path) -> RunRecord | None:
    """Return the record in a run's folder, or None where there is none.

    Raises:
        FormatError: it is no record.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    record = read_value(RunRecord, path, _FORMAT, apart="summary")
    if not record.starts:
        raise FormatError(f"{path}: has no starts; needed: the record of a run")
    return record


def end_record(folder: Path, error: BaseException, *, since_s: float) -> None:
    """Write how the last start ended, if it is one since ``since_s``, by the word of whoever started its ranks.

    That is the cause; what its ranks have written may be what followed from it.

    Raises:
        FormatError: the file is no record.
        OSError: the system cannot.
    """
    record = read_record(folder)
    if record is not None and record.last.end != "finished" and record.last.started_s >= since_s:
        last = replace(record.last, end=end_of(error, Masker.of_environment(os.environ)))
        write_record(replace(record, starts=(*record.starts[:-1], last)), folder)


def end_of(error: BaseException | None, masker: Masker) -> str:
    """Return how a start ended, in a line: "finished", "interrupted", or why it failed.

    >>> end_of(None, Masker()), end_of(ValueError("at https://a:b@c"), Masker()), end_of(KeyboardInterrupt(), Masker())
    ('finished', 'failed: at https://***@c', 'interrupted')
    """
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return masker.text(f"failed: {line}")[:_LONGEST_END]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
