"""The training loop of one rank: step after step until the last one, with evaluations, checkpoints and files between.

The first rank writes the files and reports what happens; how that is shown, and who started the ranks, is others'
business.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from chimera.data import PretrainingData, build_data
from chimera.errors import ConfigError
from chimera.timeline import write_timeline
from chimera.train.checkpoint import latest_checkpoint
from chimera.train.config import TrainConfig
from chimera.train.config_file import to_toml
from chimera.train.events import Report, Saved, Started, TrainingResult, report_to_nobody
from chimera.train.folder import CHECKPOINTS, CONFIG, TIMELINE, check_folder
from chimera.train.layout import Layout, layout_of
from chimera.train.metrics import EvaluationMetrics, StepMetrics, read_evaluations
from chimera.train.run import TrainingRun
from chimera.train.status_writer import StatusWriter
from chimera.train.tracking.choice import trackers_of
from chimera.train.tracking.command import Command
from chimera.train.tracking.extras import require_trackers
from chimera.train.tracking.masking import Masker
from chimera.train.tracking.provenance import find_origin
from chimera.train.tracking.record import RunRecord, end_of
from chimera.train.tracking.tracking import Tracking

__all__ = ["train"]


def train(
    config: TrainConfig,
    group: "dist.ProcessGroup | None",
    *,
    device: torch.device,
    resume: bool = False,
    restarted: bool = False,
    command: Command | None = None,
    report: Report | None = None,
) -> TrainingResult:
    """Train on this rank, together with the others of ``group``.

    Args:
        config: the same on every rank.
        group: the ranks of the run, as ``config.grid`` numbers them; None for one rank on its own.
        device: of this rank.
        resume: go on from the newest checkpoint of the run in ``train.out``.
        restarted: this job has begun the run before and failed; without ``resume``, it begins once more.
        command: what the record of the run names as its origin; None for this process's own.
        report: called with each event; None reports to nobody.

    Raises:
        ChimeraError: see ``chimera.errors``; no file is left half-written.
    """
    report = report or report_to_nobody
    check_folder(config, resume=resume, restarted=restarted)
    require_trackers(config.metrics)
    layout = layout_of(config)
    report("reading the corpus")
    data = build_data(config.data)
    _require_vocabulary(config, data)
    report("building the pipeline")
    run = TrainingRun(config, layout, data, group, device=device)
    loop = _Loop(run, config, layout, data, device=device, command=command or Command.here(), report=report)
    try:
        result = loop.to_the_end(resume=resume)
    except BaseException as error:
        loop.close(error)
        raise
    return replace(result, record=loop.close())


class _Loop:
    """The steps of a run, and what this rank writes and says of them."""

    def __init__(
        self,
        run: TrainingRun,
        config: TrainConfig,
        layout: Layout,
        data: PretrainingData,
        *,
        device: torch.device,
        command: Command,
        report: Report,
    ) -> None:
        self._run = run
        self._pipe = run.pipe
        self._config = config
        self._layout = layout
        self._data = data
        self._device = device
        self._command = command
        self._report = report
        self._out = Path(config.train.out)
        self._first = run.pipe.groups.rank == 0
        self._tracking: Tracking | None = None
        self._status: StatusWriter | None = None
        self._evaluations: list[EvaluationMetrics] = []

    def close(self, error: BaseException | None = None) -> RunRecord | None:
        """End threads, workers and trackers, and return the record of the run, where this rank keeps it."""
        self._run.close()
        if self._status is not None:
            self._status.close(end_of(error, Masker.of_environment(os.environ)))
        if self._tracking is None:
            return None
        self._tracking.close(error)
        return self._tracking.record

    def to_the_end(self, *, resume: bool) -> TrainingResult:
        """Train until the last step."""
        options = self._config.train
        start = self._resumed() if resume else self._begun()
        self._open_files(start)
        self._run.open_data(start)
        self._tell("training")
        began = time.perf_counter()
        last: StepMetrics | None = None
        if not start:
            self._evaluate(0)
        for step in range(start + 1, options.steps + 1):
            last = self._step(step)
            ends = step == options.steps
            if ends or step % options.evaluation_interval == 0:
                self._evaluate(step)
            if ends or step % options.checkpoint_interval == 0:
                self._save(step)
        self._write_timeline()
        assert self._run.saved is not None, "a run ends with a checkpoint, or began from its last one"
        return TrainingResult(
            out=self._out,
            steps=max(start, options.steps),
            evaluations=tuple(self._evaluations),
            last=last,
            timeline=self._run.timeline,
            unigram_entropy=self._data.unigram_entropy,
            heldout_unigram_cross_entropy=self._data.heldout_unigram_cross_entropy,
            checkpoint=self._run.saved,
            train_s=time.perf_counter() - began,
            record=None,
        )

    # Begin

    def _resumed(self) -> int:
        """Restore the newest checkpoint and return its step."""
        checkpoint = latest_checkpoint(self._out / CHECKPOINTS)
        assert checkpoint is not None, "check_folder saw one"
        self._run.restore(checkpoint)
        self._evaluations = [row for row in read_evaluations(self._out) if row.step <= checkpoint.step]
        return checkpoint.step

    def _begun(self) -> int:
        """Take the weights to begin from, where some are given, and return 0."""
        if self._config.train.weights is not None:
            self._tell("reading weights")
            self._run.import_weights()
        return 0

    def _open_files(self, start: int) -> None:
        # All ranks have come this far, so whatever could be wrong with the configuration is known by now.
        origin = find_origin(self._command, self._pipe.groups, self._device, Masker.of_environment(os.environ))
        if start < self._config.train.steps:
            self._status = StatusWriter(self._out, self._pipe, step=start)
        if not self._first:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / CONFIG).write_text(to_toml(self._config), encoding="utf-8")
        if start < self._config.train.steps:
            self._tracking = Tracking(
                self._config,
                self._out,
                trackers_of(self._config.metrics, self._out),
                self._command,
                origin,
                from_step=start,
                report=self._report,
            )
        self._report(
            Started(
                step=start,
                unigram_entropy=self._data.unigram_entropy,
                vocabulary_size=self._data.vocab_size,
                num_train_tokens=self._data.num_train_tokens,
                device=str(self._device),
            )
        )

    # Steps and what is between them

    def _step(self, step: int) -> StepMetrics:
        row = self._run.step(step)
        if self._status is not None and self._run.timeline is not None:
            self._status.stepped(row, self._run.timeline)
        self._emit(row)
        return row

    def _evaluate(self, step: int) -> None:
        began = time.perf_counter()
        row = self._run.evaluate(step)
        if row is None:
            return
        self._evaluations.append(row)
        if self._tracking is not None:
            self._tracking.evaluated(time.perf_counter() - began)
        self._emit(row)

    def _save(self, step: int) -> None:
        self._tell(f"saving the checkpoint of step {step}")
        began = time.perf_counter()
        path = self._run.save(step)
        self._tell("training")
        if self._tracking is not None:
            self._tracking.saved(time.perf_counter() - began)
            self._report(Saved(path))

    def _write_timeline(self) -> None:
        if self._first and self._run.timeline is not None:
            write_timeline(self._run.timeline, self._out / TIMELINE)

    def _emit(self, row: StepMetrics | EvaluationMetrics) -> None:
        if self._tracking is not None:
            if self._status is not None and self._status.failure is not None:
                self._tracking.failed("status", self._status.failure)
            self._tracking.add(row)
            self._report(row)

    def _tell(self, activity: str) -> None:
        """Say what this rank is at, to whoever started it and to its peers."""
        self._report(activity)
        self._pipe.watch.activity = activity


def _require_vocabulary(config: TrainConfig, data: PretrainingData) -> None:
    if data.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the vocabulary has {data.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}; set "
            f"model.vocab_size to {data.vocab_size}, or to a little more for padding"
        )
