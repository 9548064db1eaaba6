"""Writing the figures of a run: one JSON line per row, and the same for TensorBoard.

Only one rank writes. Each line is written whole and at once, so that what a killed run leaves can be read; on resuming,
rows later than the checkpoint go, and no step stands twice.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from torch.utils.tensorboard import SummaryWriter

from chimera.ir.files import replacing
from chimera.train.metrics import EVALUATIONS, METRICS, EvaluationMetrics, StepMetrics, read_rows

__all__ = ["MetricsLog"]

_TENSORBOARD: Final = "tensorboard"


class MetricsLog:
    """Writes the rows of a run into ``folder``, after those up to ``first_step`` that are there already."""

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool) -> None:
        for name in (METRICS, EVALUATIONS):
            _keep_until(folder / name, first_step)
        self._files: dict[type, IO[str]] = {
            StepMetrics: (folder / METRICS).open("a", encoding="utf-8"),
            EvaluationMetrics: (folder / EVALUATIONS).open("a", encoding="utf-8"),
        }
        self._tensorboard = (
            SummaryWriter(str(folder / _TENSORBOARD), purge_step=first_step + 1 if first_step else None)
            if tensorboard
            else None
        )

    def add(self, row: StepMetrics | EvaluationMetrics) -> None:
        """Write one row, in one piece."""
        values = row.row()
        file = self._files[type(row)]
        file.write(json.dumps(values) + "\n")
        file.flush()
        if self._tensorboard is not None:
            self._to_tensorboard(values)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _to_tensorboard(self, values: Mapping[str, Any]) -> None:
        assert self._tensorboard is not None, "called where there is a writer"
        for name, value in values.items():
            if name != "step" and value is not None:
                tag = name.replace("heldout_", "heldout/") if "heldout" in name else f"train/{name}"
                self._tensorboard.add_scalar(tag, value, values["step"])


def _keep_until(path: Path, step: int) -> None:
    """Drop the rows of steps after ``step``, and with them what a killed run wrote half."""
    if path.exists():
        kept = [row for row in read_rows(path) if row["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
