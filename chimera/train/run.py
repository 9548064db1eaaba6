"""One rank's part of a training run: data, pipeline and optimizer joined, made ready for any step.

Everything that a step depends on is a function of its number and of what a checkpoint holds, so a resumed run repeats
the steps that an uninterrupted one would have made, bit for bit. Which steps are made, and which files tell of them, is
``train.loop``'s business.
"""

import math
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from chimera.data import BatchRamp, DataConfig, Loader, Microbatch, MicrobatchSource, PretrainingData, build_data
from chimera.errors import NonFiniteError
from chimera.ir.timeline import Timeline
from chimera.runtime.ablation import Ablation
from chimera.runtime.pipeline import Pipeline
from chimera.tensor.parallel import TensorParallel
from chimera.tensor.vocabulary import Vocabulary
from chimera.train.checkpoint import Checkpoint, save_checkpoint
from chimera.train.compiling import compile_blocks, require_compiler
from chimera.train.config import TrainConfig
from chimera.train.evaluation import CountingLoss, evaluate, heldout_share
from chimera.train.families import family_of, layers_of
from chimera.train.fields import needed_fields
from chimera.train.folder import CHECKPOINTS
from chimera.train.layout import Layout
from chimera.train.metrics import EvaluationMetrics, StepMetrics
from chimera.train.precision import in_precision, torch_dtype
from chimera.train.state import describe, owned_state, require_same, restore
from chimera.train.updating import Outcome, updating_of
from chimera.train.weights import import_weights

__all__ = ["TrainingRun"]


class TrainingRun:
    """One rank's part of a run, made ready: the model is built and connected, and no step is made.

    Args:
        config: the same on every rank.
        layout: that of ``config``.
        data: that of ``config``.
        group: the ranks of the run, as ``config.grid`` numbers them; None for one rank on its own.
        device: of this rank.
        ablate: what a single byte stands in for, see ``Pipeline``; what is not finite then is no failure.
        record_details: see ``Pipeline``.

    Attributes:
        pipe: this rank's pipeline.
        saved: the newest checkpoint, which the run can go on from.
        timeline: measured, of the latest step.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        data: PretrainingData,
        group: "dist.ProcessGroup | None",
        *,
        device: torch.device,
        ablate: Ablation = "none",
        record_details: bool = False,
    ) -> None:
        self._config = config
        self._layout = layout
        self._learns = ablate == "none"
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
        self.saved: Path | None = None
        self.timeline: Timeline | None = None

    def close(self) -> None:
        """End threads and workers."""
        self.pipe.close()
        if self._loader is not None:
            self._loader.close()

    # Begin

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run.

        Raises:
            CheckpointError: an option that changes the next step is another one.
        """
        require_same(checkpoint, self._config, self._layout)
        restore(self.pipe, self._updating, checkpoint)
        self.saved = checkpoint.path

    def import_weights(self) -> None:
        """Begin from the weights that ``train.weights`` names."""
        assert self._config.train.weights is not None, "only called where some are given"
        import_weights(self.pipe, self._config.train.weights, self._config.model)

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
        self.timeline = self.pipe.timeline()
        gathers = self.pipe.gather_times() if self._config.parallel.shard_optimizer else None
        return StepMetrics(
            step=step,
            loss=loss,
            terms=dict(terms),
            grad_norm=outcome.norm if outcome.updates else None,
            lr=outcome.rate,
            tokens_per_s=self._tokens_of(len(microbatches)) / step_s,
            step_s=step_s,
            bubble_fraction=self.timeline.bubble_fraction,
            data_wait_s=self._loader.waited_s,
            loss_scale=outcome.loss_scale if self._config.train.dtype == "fp16" else None,
            gather_ms=None if gathers is None else gathers.under_way_s * 1e3,
            gather_hidden_ms=None if gathers is None else gathers.hidden_s * 1e3,
        )

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
        resumed = f"the newest checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"
        raise NonFiniteError(
            f"step {step}: loss {loss:.4g} ({terms}), gradient norm {outcome.norm:.4g}, at a learning rate of "
            f"{outcome.rate:.3g}; {self._updating.if_not_finite}, {resumed}. Try a lower --optimizer.learning-rate "
            "or a longer --learning-rate.warmup-steps"
            + (", or --train.dtype fp32" if self._config.train.dtype != "fp32" else "")
            + (", or --optimizer.clip-norm 1" if self._config.optimizer.clip_norm is None else "")
        )

    # Between steps

    def evaluate(self, step: int) -> EvaluationMetrics | None:
        """Return the losses of the held-out samples after ``step`` steps, or None where there are none."""
        return evaluate(self.pipe, self._loss, self._heldout, step=step) if self._heldout else None

    def save(self, step: int) -> Path:
        """Write a checkpoint of ``step`` steps into the run's folder and return its path."""
        self.saved = save_checkpoint(
            Path(self._config.train.out) / CHECKPOINTS,
            step,
            owned_state(self.pipe, self._updating),
            describe(self._config, self._layout, self._updating.progress),
            self.pipe.groups,
            keep=self._config.train.keep_checkpoints,
        )
        return self.saved


def _training_source(
    config: DataConfig, microbatch_size: int, microbatches_per_step: int, ramp: BatchRamp
) -> MicrobatchSource:
    """Make the source in a worker, from what this rank has put into the cache."""
    return MicrobatchSource(build_data(config).train, microbatch_size, microbatches_per_step, ramp)
