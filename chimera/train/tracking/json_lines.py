"""The figures of a run as JSON lines, beside its checkpoints: what the run itself goes on from, so always written.

Each line is written whole and at once, so that what a killed run leaves can be read; on resuming, rows later than the
checkpoint go, and no step stands twice.
"""

import json
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import ClassVar

from chimera.ir.files import replacing
from chimera.train.metrics import EVALUATIONS, METRICS, EvaluationMetrics, StepMetrics, read_rows
from chimera.train.tracking.record import RunRecord
from chimera.train.tracking.tracker import Row

__all__ = ["JsonLines"]


class JsonLines:
    """Writes rows into the run's folder, after those that stand there already."""

    name: ClassVar[str] = "jsonl"
    may_wait: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[type, FileIO] = {}

    def open(self, record: RunRecord) -> None:
        """Drop the rows of steps that are made again, and with them what a killed run wrote half."""
        for kind, name in ((StepMetrics, METRICS), (EvaluationMetrics, EVALUATIONS)):
            _keep_until(self._folder / name, record.last.from_step)
            self._files[kind] = FileIO(self._folder / name, "a")

    def add(self, rows: Sequence[Row]) -> None:
        """Write each row in one piece, or nothing of it."""
        for row in rows:
            _append(self._files[type(row)], json.dumps(row.row()) + "\n")

    def close(self, _: RunRecord) -> None:
        """Close the files; the record has one of its own."""
        for file in self._files.values():
            file.close()


def _append(file: FileIO, line: str) -> None:
    content = line.encode()
    end = file.seek(0, 2)
    try:
        written = file.write(content)
        if written != len(content):
            raise OSError(f"{written} of {len(content)} bytes were written; the disk may be full")
    except OSError:
        # Half a line would spoil the next one, once there is room again.
        file.truncate(end)
        raise


def _keep_until(path: Path, step: int) -> None:
    if path.exists():
        kept = [row for row in read_rows(path) if row["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
