"""The training loop of one rank: data, pipeline and optimizer joined, step after step, until the last one.

Everything that a step depends on is a function of its number and of what a checkpoint holds, so a resumed run repeats
the steps that an uninterrupted one would have made, bit for bit. The first rank writes the files and reports what
happens; how that is shown, and who started the ranks, is others' business.
"""

import math
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from chimera.data import BatchRamp, DataConfig, Loader, Microbatch, MicrobatchSource, PretrainingData, build_data
from chimera.errors import ConfigError, NonFiniteError
from chimera.ir.timeline import Timeline
from chimera.runtime.ablation import Ablation
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.vocabulary import Vocabulary
from chimera.timeline import write_timeline
from chimera.train.checkpoint import latest_checkpoint, save_checkpoint
from chimera.train.compiling import compile_blocks, require_compiler
from chimera.train.config import TrainConfig
from chimera.train.config_file import to_toml
from chimera.train.evaluation import CountingLoss, evaluate, heldout_share
from chimera.train.events import Event, Report, Saved, Started, TrainingResult
from chimera.train.families import family_of, layers_of
from chimera.train.fields import needed_fields
from chimera.train.folder import CHECKPOINTS, CONFIG, TIMELINE, check_folder
from chimera.train.layout import Layout, layout_of
from chimera.train.metrics import EvaluationMetrics, StepMetrics, read_evaluations
from chimera.train.precision import in_precision, torch_dtype
from chimera.train.state import describe, owned_state, require_same, restore
from chimera.train.status_writer import StatusWriter
from chimera.train.tracking.choice import trackers_of
from chimera.train.tracking.command import Command
from chimera.train.tracking.extras import require_trackers
from chimera.train.tracking.masking import Masker
from chimera.train.tracking.provenance import find_origin
from chimera.train.tracking.record import RunRecord, end_of
from chimera.train.tracking.tracking import Tracking
from chimera.train.updating import Outcome, updating_of
from chimera.train.weights import import_weights

__all__ = ["TrainingRun", "train"]


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
    report = report or _to_nobody
    check_folder(config, resume=resume, restarted=restarted)
    require_trackers(config.metrics)
    layout = layout_of(config)
    report("reading the corpus")
    data = build_data(config.data)
    _require_vocabulary(config, data)
    report("building the pipeline")
    run = TrainingRun(config, layout, data, group, device=device, command=command or Command.here(), report=report)
    try:
        result = run.to_the_end(resume=resume)
    except BaseException as error:
        run.close(error)
        raise
    return replace(result, record=run.close())


class TrainingRun:
    """One rank's part of a run, made ready: the model is built and connected, no step is made and no file written.

    Args:
        config, group, device, command: as ``train`` takes them.
        layout: that of ``config``.
        data: that of ``config``.
        report: called with each event.
        ablate: what a single byte stands in for, see ``Pipeline``; what is not finite then is no failure.
        record_details: see ``Pipeline``.

    Attributes:
        pipe: this rank's pipeline.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        data: PretrainingData,
        group: "dist.ProcessGroup | None",
        *,
        device: torch.device,
        command: Command,
        report: Report,
        ablate: Ablation = "none",
        record_details: bool = False,
    ) -> None:
        self._config = config
        self._learns = ablate == "none"
        self._layout = layout
        self._data = data
        self._device = device
        parallel = TensorParallel.join(
            group,
            config.parallel.tensor,
            sequence=config.parallel.sequence,
            device=device,
            timeout_s=config.runtime.timeout_s,
        )
        self._loss = CountingLoss(family_of(config.model).loss(Vocabulary(config.model.vocab_size, parallel)))
        self._updating = updating_of(layout.schedule, config.optimizer, config.learning_rate, config.loss_scale_if_any)
        if config.train.compile:
            require_compiler(device)
        with torch.device("meta"):
            layers = layers_of(config.model, parallel)
        layers = in_precision(layers, config.train.dtype, device, parallel)
        if config.train.compile:
            compile_blocks(layers)
        self.pipe = Pipeline(
            layers,
            layout.schedule,
            self._loss,
            group,
            tensor=parallel,
            layer_to_stage=layout.layer_to_stage,
            recompute=config.schedule.recompute,
            recompute_layers=config.schedule.recompute_layers,
            reduce=config.schedule.reduce,
            seed=config.train.seed,
            device=device,
            dtype=torch_dtype(config.train.dtype),
            shard_optimizer=config.parallel.shard_optimizer,
            bucket_bytes=config.bucket_bytes,
            update=self._updating.hook,
            ablate=ablate,
            record_details=record_details,
            timeout_s=config.runtime.timeout_s,
        )
        self._updating.build(self.pipe)
        self._fields = needed_fields(layers, layout.layer_to_stage, self.pipe.groups.stages, self._loss)
        self._source = MicrobatchSource(data.train, layout.microbatch_size, layout.microbatches_per_step, layout.ramp)
        self._loader: Loader | None = None
        self._heldout = heldout_share(
            data.heldout,
            fields=self._fields,
            num_samples=config.train.evaluation_samples,
            microbatch_size=config.train.microbatch_size,
            replica=self.pipe.groups.data_rank,
            replicas=self.pipe.groups.data_size,
        )
        self._out = Path(config.train.out)
        self._first = self.pipe.groups.rank == 0
        self._command = command
        self._report = report
        self._tracking: Tracking | None = None
        self._status: StatusWriter | None = None
        self._evaluations: list[EvaluationMetrics] = []
        self._saved: Path | None = None
        self._timeline: Timeline | None = None

    def close(self, error: BaseException | None = None) -> RunRecord | None:
        """End threads, workers and trackers, and return the record of the run, where this rank keeps it."""
        self.pipe.close()
        if self._loader is not None:
            self._loader.close()
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
        self.open_data(start)
        self._tell("training")
        began = time.perf_counter()
        last: StepMetrics | None = None
        if not start:
            self._evaluate(0)
        for step in range(start + 1, options.steps + 1):
            last = self.step(step)
            self._emit(last)
            ends = step == options.steps
            if ends or step % options.evaluation_interval == 0:
                self._evaluate(step)
            if ends or step % options.checkpoint_interval == 0:
                self._save(step)
        self._write_timeline()
        assert self._saved is not None, "a run ends with a checkpoint, or began from its last one"
        return TrainingResult(
            out=self._out,
            steps=max(start, options.steps),
            evaluations=tuple(self._evaluations),
            last=last,
            timeline=self._timeline,
            unigram_entropy=self._data.unigram_entropy,
            heldout_unigram_cross_entropy=self._data.heldout_unigram_cross_entropy,
            checkpoint=self._saved,
            train_s=time.perf_counter() - began,
            record=None,
        )

    # Begin

    def _resumed(self) -> int:
        """Restore the newest checkpoint and return its step."""
        checkpoint = latest_checkpoint(self._out / CHECKPOINTS)
        assert checkpoint is not None, "check_folder saw one"
        require_same(checkpoint, self._config, self._layout)
        restore(self.pipe, self._updating, checkpoint)
        self._saved = checkpoint.path
        self._evaluations = [row for row in read_evaluations(self._out) if row.step <= checkpoint.step]
        return checkpoint.step

    def _begun(self) -> int:
        """Take the weights to begin from, where some are given, and return 0."""
        if self._config.train.weights is not None:
            self._tell("reading weights")
            import_weights(self.pipe, self._config.train.weights, self._config.model)
        return 0

    def _open_files(self, start: int) -> None:
        # All ranks have come this far, so whatever could be wrong with the configuration is known by now.
        origin = find_origin(self._command, self.pipe.groups, self._device, Masker.of_environment(os.environ))
        if start < self._config.train.steps:
            self._status = StatusWriter(self._out, self.pipe, step=start)
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

    def open_data(self, start: int) -> None:
        """Open the micro-batches of the steps from ``start`` on, counted from 0."""
        config, layout, groups = self._config, self._layout, self.pipe.groups
        sizes = (layout.microbatch_size, layout.microbatches_per_step, layout.ramp)
        self._loader = Loader(
            self._source,
            replica=groups.data_rank,
            replicas=groups.data_size,
            fields=self._fields,
            first_step=start,
            last_step=config.train.steps,
            workers=config.data.workers,
            make_source=partial(_training_source, config.data, *sizes),
            timeout_s=config.runtime.timeout_s,
            name=", ".join(config.data.datasets) or config.data.corpus,
        )

    # One step

    def step(self, step: int) -> StepMetrics:
        """Make the ``step``-th step, counted from 1: one update, or those of an asynchronous schedule."""
        began = time.perf_counter()
        assert self._loader is not None, "a run opens its loader before its first step"
        microbatches = self._loader.next()
        loss = self._gradients(microbatches)
        terms = self.pipe.terms
        outcome = self._updating.measure()
        self._require_finite(step, loss, outcome)
        self._updating.finish(outcome)
        step_s = time.perf_counter() - began
        self._timeline = self.pipe.timeline()
        gathers = self.pipe.gather_times() if self._config.parallel.shard_optimizer else None
        row = StepMetrics(
            step=step,
            loss=loss,
            terms=dict(terms),
            grad_norm=outcome.norm if outcome.updates else None,
            lr=outcome.rate,
            tokens_per_s=self._tokens_of(len(microbatches)) / step_s,
            step_s=step_s,
            bubble_fraction=self._timeline.bubble_fraction,
            data_wait_s=self._loader.waited_s,
            loss_scale=outcome.loss_scale if self._config.train.dtype == "fp16" else None,
            gather_ms=None if gathers is None else gathers.under_way_s * 1e3,
            gather_hidden_ms=None if gathers is None else gathers.hidden_s * 1e3,
        )
        if self._status is not None:
            self._status.stepped(row, self._timeline)
        return row

    def _tokens_of(self, microbatches: int) -> int:
        """Return the positions of a step of so many micro-batches on each replica."""
        samples = microbatches * self._layout.microbatch_size * self.pipe.groups.data_size
        return samples * self._config.data.sequence_length

    def _gradients(self, microbatches: list[Microbatch]) -> float:
        """Run all accumulation runs of a step, fewer while its batch still grows, and return its loss."""
        size = self._layout.microbatches_per_run
        runs = len(microbatches) // size
        first = self.pipe.groups.data_rank * len(microbatches)
        numbers = range(first, first + len(microbatches))
        counts = dict.fromkeys(self._loss.terms, 0.0)
        # Ranks without the last stage have no labels, and nobody asks them for counts.
        if set(self._loss.fields) <= self._fields:
            for microbatch in microbatches:
                for name, count in self._loss.counts(microbatch).items():
                    counts[name] += count
        scale = self._updating.begin()
        for run in range(runs):
            part = slice(run * size, (run + 1) * size)
            loss = self.pipe.step(
                microbatches[part],
                microbatches[part],
                last=run == runs - 1,
                # An asynchronous schedule counts for each of its updates.
                counts=None if self._layout.schedule.is_asynchronous else counts,
                microbatch_indices=numbers[part],
                loss_scale=scale,
            )
        return float(loss)

    def _require_finite(self, step: int, loss: float, outcome: Outcome) -> None:
        """Refuse to go on where no smaller loss scale can help."""
        may_skip = not outcome.updates and not self._updating.progress.loss_scale.is_least
        if not self._learns or may_skip or (math.isfinite(loss) and math.isfinite(outcome.norm)):
            return
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.pipe.terms.items())
        resumed = f"the newest checkpoint is {self._saved}" if self._saved else "there is no checkpoint yet"
        raise NonFiniteError(
            f"step {step}: loss {loss:.4g} ({terms}), gradient norm {outcome.norm:.4g}, at a learning rate of "
            f"{outcome.rate:.3g}; {self._updating.if_not_finite}, {resumed}. Try a lower --optimizer.learning-rate "
            "or a longer --learning-rate.warmup-steps"
            + (", or --train.dtype fp32" if self._config.train.dtype != "fp32" else "")
            + (", or --optimizer.clip-norm 1" if self._config.optimizer.clip_norm is None else "")
        )

    # Between steps

    def _evaluate(self, step: int) -> None:
        if self._heldout:
            began = time.perf_counter()
            row = evaluate(self.pipe, self._loss, self._heldout, step=step)
            self._evaluations.append(row)
            if self._tracking is not None:
                self._tracking.evaluated(time.perf_counter() - began)
            self._emit(row)

    def _save(self, step: int) -> None:
        self._tell(f"saving the checkpoint of step {step}")
        began = time.perf_counter()
        self._saved = save_checkpoint(
            self._out / CHECKPOINTS,
            step,
            owned_state(self.pipe, self._updating),
            describe(self._config, self._layout, self._updating.progress),
            self.pipe.groups,
            keep=self._config.train.keep_checkpoints,
        )
        self._tell("training")
        if self._tracking is not None:
            self._tracking.saved(time.perf_counter() - began)
            self._report(Saved(self._saved))

    def _write_timeline(self) -> None:
        if self._first and self._timeline is not None:
            write_timeline(self._timeline, self._out / TIMELINE)

    def _emit(self, row: StepMetrics | EvaluationMetrics) -> None:
        if self._tracking is not None:
            if self._status is not None and self._status.failure is not None:
                self._tracking.failed("status", self._status.failure)
            self._tracking.add(row)
            self._report(row)

    def _tell(self, activity: str) -> None:
        """Say what this rank is at, to whoever started it and to its peers."""
        self._report(activity)
        self.pipe.watch.activity = activity


def _training_source(
    config: DataConfig, microbatch_size: int, microbatches_per_step: int, ramp: BatchRamp
) -> MicrobatchSource:
    """Make the source in a worker, from what this rank has put into the cache."""
    return MicrobatchSource(build_data(config).train, microbatch_size, microbatches_per_step, ramp)


def _to_nobody(_: Event) -> None:
    """Report nothing."""


def _require_vocabulary(config: TrainConfig, data: PretrainingData) -> None:
    if data.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the vocabulary has {data.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}; set "
            f"model.vocab_size to {data.vocab_size}, or to a little more for padding"
        )
