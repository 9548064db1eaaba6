"""The figures of a run in Weights & Biases (extra ``wandb``), online, or offline by its own ``WANDB_MODE``.

Only what is given here leaves the machine: collection of the command line, the repository and the code by the library
itself is switched off, since nobody would mask what it finds.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from chimera.train.tracking.record import RunRecord
from chimera.train.tracking.tracker import Row, figures

__all__ = ["WeightsAndBiases"]


class WeightsAndBiases:
    """Logs rows to a run of ``project``; files of its own are in ``wandb/`` of the run's folder."""

    name: ClassVar[str] = "wandb"
    may_wait: ClassVar[bool] = True

    def __init__(self, folder: Path, project: str) -> None:
        self._folder = folder
        self._project = project
        self._run: Any = None

    def open(self, record: RunRecord) -> str:
        """Begin a run, or go on with the one of an earlier start; its config is the run's, its origin beside it."""
        import wandb

        # Silent before anything else: it would otherwise ask for a key on the terminal, and wait.
        wandb.setup(settings=wandb.Settings(silent=True))
        known = record.trackers.get(self.name)
        self._run = wandb.init(
            project=self._project,
            name=record.name,
            id=known.reference if known else None,
            resume="allow",
            dir=str(self._folder),
            config={**record.config, "origin": asdict(record.last.origin)},
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        # By our own step: its own cannot go back to that of a checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def add(self, rows: Sequence[Row]) -> None:
        """Log each row's figures over its step."""
        for row in rows:
            self._run.log({"step": row.step, **figures(row)})

    def close(self, record: RunRecord) -> None:
        """Log what the run came to, and end it as it ended."""
        self._run.summary.update({f"run/{name}": value for name, value in record.summary().items()})
        self._run.finish(exit_code=0 if record.last.end == "finished" else 1)
