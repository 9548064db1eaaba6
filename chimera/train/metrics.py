"""The figures of a run, as they are reported and as they stand in its files: one row per step and per evaluation.

Step n is the n-th step of the run: row n is written after n of them, an evaluation's row says how many came before it.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from chimera.errors import FormatError

__all__ = ["EVALUATIONS", "METRICS", "EvaluationMetrics", "StepMetrics", "read_evaluations", "read_rows"]

METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "evaluation.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step.

    Attributes:
        step: steps done, this one included.
        loss: mean masked-word plus mean next-sentence loss over the global batch, in nats.
        mlm_loss, nsp_loss: its two terms.
        grad_norm: 2-norm of the whole model's gradient, before clipping, of the last update where a step makes several;
            None where an overflow had the update skipped.
        lr: learning rate of this step, or of its last update.
        tokens_per_s: positions of the global batch, padding included, by ``step_s``.
        step_s: seconds from the first micro-batch to the updated weights, on the first rank.
        bubble_fraction: measured idle share of the pipeline's ranks, from the first start to the last end.
        data_wait_s: seconds of the step that the first rank waited for its micro-batches.
        loss_scale: what the loss was multiplied by; None but in fp16.
        gather_ms: milliseconds that updated weights were on their way to the other replicas, the mean over the ranks;
            0 in the first step, None without sharded optimizer states.
        gather_hidden_ms: how much of it went on beside other work.
    """

    step: int
    loss: float
    mlm_loss: float
    nsp_loss: float
    grad_norm: float | None
    lr: float
    tokens_per_s: float
    step_s: float
    bubble_fraction: float
    data_wait_s: float
    loss_scale: float | None = None
    gather_ms: float | None = None
    gather_hidden_ms: float | None = None

    def row(self) -> dict[str, Any]:
        """Return the figures by name, without those that the run does not have."""
        optional = {field.name for field in fields(self) if field.default is None}
        return {name: value for name, value in asdict(self).items() if value is not None or name not in optional}


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

    def row(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def read_evaluations(folder: Path) -> tuple[EvaluationMetrics, ...]:
    """Return the evaluations of the run in ``folder``, in order.

    Raises:
        FormatError: a line is none.
    """
    path = folder / EVALUATIONS
    names = {field.name for field in fields(EvaluationMetrics)}
    rows = read_rows(path)
    for number, row in enumerate(rows):
        if row.keys() != names:
            raise FormatError(f"{path}: line {number + 1} has the keys {', '.join(row)}; needed: {', '.join(names)}")
    return tuple(EvaluationMetrics(**row) for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, none if it does not exist, without the line that a killed run wrote half.

    Raises:
        FormatError: another line is no row.
    """
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
