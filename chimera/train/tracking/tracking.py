"""All that is told of a run, by its first rank: rows to every tracker, the account of its time to the record.

The record is opened with the trackers and closed with them, so each has the whole of it. Nothing that fails here ends
the run: it is reported once, and named in the record.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from chimera.train.config import TrainConfig
from chimera.train.events import Event, TrackerFailed
from chimera.train.metrics import StepMetrics
from chimera.train.tracking.command import Command
from chimera.train.tracking.guard import Guarded, InBackground
from chimera.train.tracking.ledger import Ledger
from chimera.train.tracking.masking import Masker
from chimera.train.tracking.record import RECORD, Origin, RunRecord, end_of
from chimera.train.tracking.tracker import Row, Tracker

__all__ = ["Tracking"]

_CLOSE_S: Final = 30.0
"""How long the end of a run waits for what is still under way."""
_CLOSE_AFTER_FAILURE_S: Final = 2.0
"""And that of a failed one, whose last words are waited for."""


class Tracking:
    """Tells trackers and record of a run.

    Args:
        config: of the run.
        folder: of the run; it exists.
        trackers: not open.
        command, origin: where this start comes from.
        from_step: steps that stand before this start.
        report: called with each tracker's first failure.

    Raises:
        FormatError: what an earlier start left in the folder cannot be gone on from.
        OSError: a tracker of this machine cannot begin.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        trackers: Sequence[Tracker],
        command: Command,
        origin: Origin,
        *,
        from_step: int,
        report: Callable[[Event], None],
    ) -> None:
        masker = Masker.of_environment(os.environ)
        self._masker = masker
        self._report = report
        self._reported: set[str] = set()
        self._ledger = Ledger(config, folder, command, origin, from_step=from_step, masker=masker)
        self._guarded = [
            InBackground(tracker, masker) if tracker.may_wait else Guarded(tracker, masker) for tracker in trackers
        ]
        for guarded in self._guarded:
            guarded.open(self._ledger.record)
        self._write(now=True)

    @property
    def record(self) -> RunRecord:
        """The record as it stands."""
        return self._ledger.record

    def add(self, row: Row) -> None:
        """Tell of a step or an evaluation."""
        if isinstance(row, StepMetrics):
            self._ledger.stepped(row)
        for guarded in self._guarded:
            guarded.add(row)
        self._write()

    def evaluated(self, seconds: float) -> None:
        """Tell how long an evaluation took."""
        self._ledger.evaluated(seconds)

    def saved(self, seconds: float) -> None:
        """Tell how long a save took; the record goes to the disk with the checkpoint."""
        self._ledger.saved(seconds)
        self._write(now=True)

    def failed(self, name: str, error: OSError) -> None:
        """Tell, once, of another file of the run that cannot be written."""
        self._tell(name, self._masker.text(str(error)))

    def close(self, error: BaseException | None) -> None:
        """Tell how the run ended, wait for what is under way, and write the record for the last time."""
        self._ledger.ended(end_of(error, self._masker))
        self._note()
        for guarded in self._guarded:
            guarded.close(self._ledger.record, within_s=_CLOSE_S if error is None else _CLOSE_AFTER_FAILURE_S)
        self._write(now=True)

    def _write(self, *, now: bool = False) -> None:
        self._note()
        try:
            self._ledger.write(now=now)
        except OSError as error:
            self.failed(RECORD, error)

    def _note(self) -> None:
        """Enter what became of the trackers, and report what has failed since."""
        outcomes = {guarded.name: guarded.outcome for guarded in self._guarded}
        self._ledger.told(outcomes)
        for name, outcome in outcomes.items():
            if outcome.first_failure is not None:
                self._tell(name, outcome.first_failure)

    def _tell(self, name: str, failure: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._report(TrackerFailed(name, failure))
