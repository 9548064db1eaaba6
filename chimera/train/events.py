"""What a run says while it runs, and what it comes to. Values that one process can send to another; they do nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chimera.ir.timeline import Timeline
from chimera.train.metrics import EvaluationMetrics, StepMetrics
from chimera.train.tracking.record import RunRecord

__all__ = ["Event", "Report", "Restarted", "Saved", "Started", "TrackerFailed", "TrainingResult", "report_to_nobody"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The run is about to make its first step.

    Attributes:
        step: steps done before, by the run that is resumed.
        unigram_entropy: of the training text, in nats; see ``PretrainingData``.
        vocabulary_size: tokens of the vocabulary; the model may have more rows.
        num_train_tokens: word pieces to train on.
        device: where the first rank computes.
    """

    step: int
    unigram_entropy: float
    vocabulary_size: int
    num_train_tokens: int
    device: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The job failed, and its launcher has started it again.

    Attributes:
        restarts: how often so far.
        checkpoint: that the run goes on from; None where it begins anew.
    """

    restarts: int
    checkpoint: Path | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete."""

    path: Path


@dataclass(frozen=True, slots=True)
class TrackerFailed:
    """A tracker, or the record, could not be written; told once, the run goes on.

    Attributes:
        name: as ``[metrics]`` calls it, or the file.
        failure: when and why, without secrets.
    """

    name: str
    failure: str


Event = Restarted | Started | StepMetrics | EvaluationMetrics | Saved | TrackerFailed | str
"""What a rank reports; a text says what it is at. Only the first rank reports anything else."""

Report = Callable[[Event], None]
"""Called with each event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What a run came to; equal on every rank but for the timeline, which the ranks of one replica share.

    Attributes:
        out: folder of the run.
        steps: steps done in all.
        evaluations: on the held-out samples, all of the run; the first one before any step.
        last: the figures of the last step; None where nothing was left to do.
        timeline: measured, of the last step; None where nothing was left to do.
        unigram_entropy: of the training text, in nats.
        heldout_unigram_cross_entropy: held-out loss of knowing the training text's word frequencies, in nats.
        checkpoint: the newest one.
        train_s: seconds of this run's steps and evaluations, start-up apart.
        record: of the run; None where nothing was left to do, and on all ranks but the first.
    """

    out: Path
    steps: int
    evaluations: tuple[EvaluationMetrics, ...]
    last: StepMetrics | None
    timeline: Timeline | None
    unigram_entropy: float
    heldout_unigram_cross_entropy: float
    checkpoint: Path
    train_s: float
    record: RunRecord | None


def report_to_nobody(_: Event) -> None:
    """Report nothing."""
