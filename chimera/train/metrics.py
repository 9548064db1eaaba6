"""The figures of a run: one JSON line per step and per evaluation, and the same for TensorBoard.

Step n is the n-th step of the run: row n is written after n updates, an evaluation's row says how many came before it.
Only one rank writes. Each line is written whole and at once, so that what a killed run leaves can be read; on resuming,
rows later than the checkpoint go, and no step stands twice.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Final

from torch.utils.tensorboard import SummaryWriter

from chimera.errors import FormatError
from chimera.ir.files import replacing

__all__ = ["EVALUATIONS", "METRICS", "EvaluationMetrics", "MetricsLog", "StepMetrics", "read_evaluations"]

METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "evaluation.jsonl"
_TENSORBOARD: Final = "tensorboard"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step.

    Attributes:
        step: steps done, this one included.
        loss: mean masked-word plus mean next-sentence loss over the global batch, in nats.
        mlm_loss, nsp_loss: its two terms.
        grad_norm: 2-norm of the whole model's gradient, before clipping.
        lr: learning rate of this step.
        tokens_per_s: positions of the global batch, padding included, by ``step_s``.
        step_s: seconds from the first micro-batch to the updated weights, on the first rank.
        bubble_fraction: measured idle share of the pipeline's ranks, from the first start to the last end.
    """

    step: int
    loss: float
    mlm_loss: float
    nsp_loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    bubble_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """One evaluation on the held-out samples.

    Attributes:
        step: steps done before it.
        heldout_mlm_loss: mean over all masked words, in nats.
        heldout_nsp_loss: mean over all pairs, in nats.
        heldout_nsp_accuracy: share of the pairs told right.
        heldout_pairs: how many pairs those were.
    """

    step: int
    heldout_mlm_loss: float
    heldout_nsp_loss: float
    heldout_nsp_accuracy: float
    heldout_pairs: int


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
            SummaryWriter(str(folder / _TENSORBOARD), purge_step=first_step + 1 if first_step else None)  # type: ignore[no-untyped-call]
            if tensorboard
            else None
        )

    def add(self, row: StepMetrics | EvaluationMetrics) -> None:
        """Write one row, in one piece."""
        values = asdict(row)
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
            self._tensorboard.close()  # type: ignore[no-untyped-call]

    def _to_tensorboard(self, values: Mapping[str, Any]) -> None:
        assert self._tensorboard is not None, "called where there is a writer"
        for name, value in values.items():
            if name != "step":
                tag = name.replace("heldout_", "heldout/") if "heldout" in name else f"train/{name}"
                self._tensorboard.add_scalar(tag, value, values["step"])  # type: ignore[no-untyped-call]


def read_evaluations(folder: Path) -> tuple[EvaluationMetrics, ...]:
    """Return the evaluations of the run in ``folder``, in order.

    Raises:
        FormatError: a line is none.
    """
    path = folder / EVALUATIONS
    names = {field.name for field in fields(EvaluationMetrics)}
    rows = _rows(path)
    for number, row in enumerate(rows):
        if row.keys() != names:
            raise FormatError(f"{path}: line {number + 1} has the keys {', '.join(row)}; needed: {', '.join(names)}")
    return tuple(EvaluationMetrics(**row) for row in rows)


def _keep_until(path: Path, step: int) -> None:
    """Drop the rows of steps after ``step``, and with them what a killed run wrote half."""
    if path.exists():
        kept = [row for row in _rows(path) if row["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines) - 1 and not line.endswith("\n"):
                break  # the run was killed while the system wrote this
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise FormatError(f"{path}: line {number + 1} is no row of a run: {line.strip()[:80]!r}")
        rows.append(row)
    return rows
