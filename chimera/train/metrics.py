"""The figures of a run, as they are reported and as they stand in its files: one row per step and per evaluation.

Step n is the n-th step of the run: row n is written after n of them, an evaluation's row says how many came before it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from chimera.errors import FormatError

__all__ = ["EVALUATIONS", "METRICS", "EvaluationMetrics", "StepMetrics", "read_evaluations", "read_rows"]

METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "evaluation.jsonl"
_ANSWERS: Final = "heldout_pairs"
_OF_TERM: Final = re.compile(r"heldout_(\w+)_(loss|accuracy)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step.

    Attributes:
        step: steps done, this one included.
        loss: over the global batch, in nats: the sum of its terms.
        terms: each of them by name, a mean; a row has them as ``mlm_loss``, ``nsp_loss`` and so on.
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
    terms: Mapping[str, float]
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
        row: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name == "terms":
                row |= {f"{term}_loss": mean for term, mean in value.items()}
            elif value is not None or name not in optional:
                row[name] = value
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """One evaluation on the held-out samples.

    Attributes:
        step: steps done before it.
        terms: the mean of each loss term by name, in nats; a row has them as ``heldout_mlm_loss`` and so on.
        told_right: the term whose right answers were counted (``nsp``, ``retrieval``); None for none.
        accuracy: share of the answers that were right; a row has it as ``heldout_nsp_accuracy`` and so on.
        answers: how many answers those were; a row has it as ``heldout_pairs``.
    """

    step: int
    terms: Mapping[str, float]
    told_right: str | None = None
    accuracy: float | None = None
    answers: int | None = None

    @property
    def first_term(self) -> tuple[str, float]:
        """The term that a reader looks at first, by name."""
        return next(iter(self.terms.items()))

    def row(self) -> dict[str, Any]:
        """Return the figures by name."""
        row: dict[str, Any] = {"step": self.step}
        row |= {f"heldout_{term}_loss": mean for term, mean in self.terms.items()}
        if self.told_right is not None:
            row |= {f"heldout_{self.told_right}_accuracy": self.accuracy, _ANSWERS: self.answers}
        return row

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "EvaluationMetrics | None":
        """Return what ``row`` made a row of; None where it is no such row."""
        found = {name: _OF_TERM.fullmatch(name) for name in row if name not in {"step", _ANSWERS}}
        kinds = {name: match and (match[1], match[2]) for name, match in found.items()}
        terms = {kind[0]: row[name] for name, kind in kinds.items() if kind and kind[1] == "loss"}
        right = [(kind[0], row[name]) for name, kind in kinds.items() if kind and kind[1] == "accuracy"]
        known = all(kinds.values()) and terms and "step" in row
        if not known or len(right) != (_ANSWERS in row) or any(term not in terms for term, _ in right):
            return None
        if not right:
            return cls(step=row["step"], terms=terms)
        return cls(step=row["step"], terms=terms, told_right=right[0][0], accuracy=right[0][1], answers=row[_ANSWERS])


def read_evaluations(folder: Path) -> tuple[EvaluationMetrics, ...]:
    """Return the evaluations of the run in ``folder``, in order.

    Raises:
        FormatError: a line is none.
    """
    path = folder / EVALUATIONS
    read = []
    for number, row in enumerate(read_rows(path)):
        evaluation = EvaluationMetrics.of_row(row)
        if evaluation is None:
            raise FormatError(
                f"{path}: line {number + 1} has the keys {', '.join(row)}; needed: step, heldout_<term>_loss for each "
                f"term, and heldout_<term>_accuracy with {_ANSWERS} or neither of the two"
            )
        read.append(evaluation)
    return tuple(read)


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
