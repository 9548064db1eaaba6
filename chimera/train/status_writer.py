"""Keeps a rank's status file up to date, from the thread that publishes the rank's position anyway.

The figures of the last step come from the training loop, place and wait from the watch. A file that cannot be written
stops nothing; the loop asks for the failure and says it once.
"""

import os
import socket
import time
from pathlib import Path

import torch

from chimera.ir.timeline import Timeline
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.watch import Position
from chimera.train.metrics import StepMetrics
from chimera.train.status import RankStatus, status_interval_s, write_status

__all__ = ["StatusWriter"]


class StatusWriter:
    """Writes the status of this rank into a run's folder as long as the pipeline's watch runs.

    Args:
        folder: of the run.
        pipe: of this rank.
        step: steps done.
    """

    def __init__(self, folder: Path, pipe: Pipeline, *, step: int) -> None:
        self._folder = folder
        self._watch = pipe.watch
        self._rank, self._pipeline_rank = pipe.groups.rank, pipe.groups.pipeline_rank
        self._device = pipe.groups.device
        self._interval_s = status_interval_s(pipe.groups.size)
        self._host = socket.gethostname()
        self._due = 0.0
        self._place: tuple[str, int | None] = ("", None)
        self._since = time.monotonic()
        self._step = step
        self._figures: tuple[float, float, float] | None = None
        self.failure: OSError | None = None
        """Why the last file could not be written; None where it could."""
        pipe.watch.listen(self._write_if_due)

    def stepped(self, row: StepMetrics, timeline: Timeline) -> None:
        """Note the figures of a step."""
        idle = 1.0 - float(timeline.busy[self._pipeline_rank]) / timeline.makespan if timeline.makespan else 0.0
        self._step = row.step
        self._figures = row.step_s, row.tokens_per_s, idle

    def close(self, end: str) -> None:
        """Write the last status; the watch has been closed before."""
        self._write(self._watch.position(), end)

    def _write_if_due(self, position: Position) -> None:
        # The watch speaks once a second, give or take its naps.
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s - 0.5
            self._write(position, None)

    def _write(self, position: Position, end: str | None) -> None:
        now = time.monotonic()
        place = position.activity, position.position
        if place != self._place:
            self._place, self._since = place, now
        step_s, tokens_per_s, idle_share = self._figures or (None, None, None)
        status = RankStatus(
            rank=self._rank,
            host=self._host,
            process_id=os.getpid(),
            time_s=position.time_s,
            interval_s=self._interval_s,
            activity=position.activity,
            position=position.position,
            action=position.action,
            unchanged_s=now - self._since,
            awaited=position.awaited,
            waited_s=position.waited_s,
            step=self._step,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            idle_share=idle_share,
            memory_bytes=_resident_bytes(),
            device_bytes=torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else None,
            end=end,
        )
        try:
            write_status(status, self._folder)
        except OSError as error:
            self.failure = error


def _resident_bytes() -> int:
    """Return this process's resident memory; 0 where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
