"""The one interface to whatever keeps the figures of a run: opened once, told every row, closed.

A tracker raises what goes wrong; ``tracking`` sees to it that no failure ends a run or stays unsaid. What names the
figures have for those that show curves is decided here, so that it is the same everywhere.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from chimera.train.metrics import EvaluationMetrics, StepMetrics
from chimera.train.tracking.record import RunRecord

__all__ = ["Row", "Tracker", "figures"]

Row = StepMetrics | EvaluationMetrics


class Tracker(Protocol):
    """Keeps the rows of a run.

    Attributes:
        name: as ``[metrics]`` calls it.
        may_wait: whether it may wait for somebody, such as a server; it is then driven by a thread of its own, and gets
            several rows at once.
    """

    name: ClassVar[str]
    may_wait: ClassVar[bool]

    def open(self, record: RunRecord) -> str | None:
        """Begin, or go on with the run that an earlier start began.

        Args:
            record: of the run; rows later than ``record.last.from_step`` are made again.

        Returns:
            What to go on with after a restart, which then stands in ``record.trackers``; None where nothing is needed.
        """

    def add(self, rows: Sequence[Row]) -> None:
        """Keep rows, in their order."""

    def close(self, record: RunRecord) -> None:
        """Keep what the run came to, and end."""


def figures(row: Row) -> dict[str, float]:
    """Return the figures of a row by the names that curves have: ``train/loss``, ``heldout/mlm_loss``."""
    values = {name: value for name, value in row.row().items() if name != "step" and value is not None}
    group = "train" if isinstance(row, StepMetrics) else "heldout"
    return {f"{group}/{name.removeprefix('heldout_')}": value for name, value in values.items()}
