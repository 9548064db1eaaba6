"""The account of one start of a run: what its time went into, brought up to date in ``run.json`` as it goes on.

The file is replaced now and then, not at every step: what a killed run leaves is a few seconds old. Only the first rank
keeps one.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from chimera.train.config import TrainConfig
from chimera.train.metrics import METRICS, StepMetrics, read_rows
from chimera.train.tracking.command import Command
from chimera.train.tracking.masking import Masker
from chimera.train.tracking.record import Origin, RunRecord, RunStart, TrackerRecord, read_record, write_record

__all__ = ["Ledger"]

_INTERVAL_S: Final = 10.0
_KILLED: Final = "killed"
"""The end of a start that did not write its own: a signal, or the loss of its host."""


class Ledger:
    """Keeps the record of a run in ``folder``.

    Args:
        config: of the run.
        folder: its folder; the record of earlier starts is read there.
        command, origin: of this start.
        from_step: steps that stand before this start.

    Raises:
        FormatError: what stands there is no record; nothing is changed.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, command: Command, origin: Origin, *, from_step: int, masker: Masker
    ) -> None:
        earlier = read_record(folder)
        start = RunStart(
            origin=origin,
            started_s=command.started_s,
            seen_s=time.time(),
            from_step=from_step,
            step=from_step,
            # Without the start that made these steps there is no wall time to hold them against either.
            carried_s=_useful_s(folder, from_step) if earlier else 0.0,
        )
        self._folder = folder
        self._written_s = 0.0
        self.record = RunRecord(
            name=masker.text(folder.absolute().name),
            steps=config.train.steps,
            config=masker.values(asdict(config)),
            starts=(*_ended(earlier), start),
            trackers=earlier.trackers if earlier else {},
        )

    def stepped(self, row: StepMetrics) -> None:
        """Enter a step."""
        start = self.record.last
        now = time.time()
        self._change(
            step=row.step,
            first_step_s=now - start.started_s if start.first_step_s is None else start.first_step_s,
            steps_s=start.steps_s + row.step_s - row.data_wait_s,
            data_wait_s=start.data_wait_s + row.data_wait_s,
            tokens=start.tokens + round(row.tokens_per_s * row.step_s),
        )

    def evaluated(self, seconds: float) -> None:
        """Enter an evaluation."""
        self._change(evaluation_s=self.record.last.evaluation_s + seconds)

    def saved(self, seconds: float) -> None:
        """Enter a save."""
        start = self.record.last
        self._change(checkpoint_s=start.checkpoint_s + seconds, checkpoints=start.checkpoints + 1)

    def ended(self, end: str) -> None:
        """Enter how this start ended."""
        self._change(end=end)

    def told(self, trackers: dict[str, TrackerRecord]) -> None:
        """Enter what became of the trackers."""
        self.record = replace(self.record, trackers=self.record.trackers | trackers)

    def write(self, *, now: bool = False) -> None:
        """Write the record, if it is due or ``now``.

        Raises:
            OSError: the system cannot; the next call tries again when it is due again.
        """
        if not now and time.monotonic() - self._written_s < _INTERVAL_S:
            return
        self._written_s = time.monotonic()
        write_record(self.record, self._folder)

    def _change(self, **values: object) -> None:
        start = replace(self.record.last, seen_s=time.time(), **values)  # type: ignore[arg-type]
        self.record = replace(self.record, starts=(*self.record.starts[:-1], start))


def _ended(earlier: RunRecord | None) -> tuple[RunStart, ...]:
    """Return earlier starts, with an end for one that could not write it."""
    if earlier is None:
        return ()
    return tuple(replace(start, end=start.end or _KILLED) for start in earlier.starts)


def _useful_s(folder: Path, step: int) -> float:
    """Return the seconds that the steps up to ``step`` took, waiting for data apart."""
    rows = (row for row in read_rows(folder / METRICS) if row["step"] <= step)
    return sum(float(row["step_s"]) - float(row["data_wait_s"]) for row in rows)
