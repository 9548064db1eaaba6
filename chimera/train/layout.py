"""What a configuration makes of a schedule and a model: the schedule, the cut into stages, the sizes of a step.

All of it is a pure function of the configuration, so every rank works it out alone, and ``chimera train`` says it
before any rank starts. Knows no processes and no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chimera.data.ramp import NO_RAMP, BatchRamp
from chimera.errors import ConfigError, UsageError, nearest_names
from chimera.ir.costs import Costs
from chimera.ir.costs_file import read_costs
from chimera.ir.schedule import Schedule
from chimera.ir.schedule_file import read_schedule
from chimera.passes.derived import has_backward
from chimera.plan.layout_string import cut_by_count, cut_from_layout
from chimera.plan.partition import partition
from chimera.schedules import SCHEDULES, build_schedule
from chimera.simulate import simulate
from chimera.train.config import ScheduleOptions, TrainConfig
from chimera.train.families import family_of

__all__ = ["Layout", "layout_of", "predicted_bubble"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is laid out.

    Attributes:
        schedule: as built, computations only.
        layer_to_stage: the stage of each layer.
        microbatch_size: samples of one of the schedule's micro-batches (half of a whole one under backward halving).
        microbatches_per_run: the schedule's micro-batches, over all routes.
        microbatches_per_step: over all routes, accumulation runs and data-parallel replicas.
        ramp: how the batch of the first steps grows, by whole runs.
    """

    schedule: Schedule
    layer_to_stage: tuple[int, ...]
    microbatch_size: int
    microbatches_per_run: int
    microbatches_per_step: int
    ramp: BatchRamp = NO_RAMP

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.microbatch_size * self.microbatches_per_step


def layout_of(config: TrainConfig) -> Layout:
    """Build the schedule and cut the model.

    Raises:
        ConfigError: the schedule's ranks are not ``parallel.pipeline``, or its micro-batches cannot be cut.
        UsageError: a size that the schedule does not take, or more stages than layers.
    """
    schedule = _schedule(config.schedule, config.parallel.pipeline)
    if schedule.num_ranks != config.parallel.pipeline:
        raise ConfigError(
            f"schedule.name = {config.schedule.name!r} has {schedule.num_ranks} ranks, parallel.pipeline is "
            f"{config.parallel.pipeline}; set parallel.pipeline to {schedule.num_ranks}"
        )
    if not has_backward(schedule):
        raise ConfigError(f"schedule.name = {config.schedule.name!r} has no backward; it cannot train")
    size = config.train.microbatch_size * schedule.microbatch_share
    if size != int(size):
        raise ConfigError(
            f"train.microbatch_size = {config.train.microbatch_size} cannot be cut for schedule.unit = "
            f"{config.schedule.unit!r}, which runs parts of {schedule.microbatch_share} of a micro-batch; "
            f"try {config.train.microbatch_size - 1 or 2} or {config.train.microbatch_size + 1}"
        )
    runs = config.train.accumulation_runs * config.parallel.data
    layer_to_stage = _cut(config, schedule.num_stages)
    if schedule.is_asynchronous:
        _require_own_updates(config, layer_to_stage)
    layout = Layout(
        schedule,
        layer_to_stage,
        int(size),
        schedule.num_microbatches,
        schedule.num_microbatches * runs,
        BatchRamp(*config.train.batch_ramp),
    )
    _check_ramp(config, layout)
    return layout


def _cut(config: TrainConfig, num_stages: int) -> tuple[int, ...]:
    """Return the stage of each layer, as ``parallel.cut`` says."""
    how = config.parallel.cut
    if how == "cost":
        return partition(family_of(config.model).costs(config.model, config.data), num_stages)
    if how == "count":
        return cut_by_count(config.model.stacks, num_stages)
    try:
        cut = cut_from_layout(how, config.model.stacks)
    except UsageError as error:
        raise ConfigError(f"[parallel] cut is neither cost nor count, but a layout: {error}") from error
    if cut[-1] + 1 != num_stages:
        raise ConfigError(
            f"[parallel] cut = {how!r} has {cut[-1] + 1} stages, the schedule {config.schedule.name!r} has "
            f"{num_stages}; write as many, cut by cost, or change parallel.pipeline or the schedule's chunks"
        )
    return cut


def _check_ramp(config: TrainConfig, layout: Layout) -> None:
    """Refuse a batch that does not grow by whole runs of all replicas."""
    if not layout.ramp.start:
        return
    if layout.schedule.is_asynchronous:
        raise ConfigError(
            f"[train] batch_ramp is given, but schedule.name = {config.schedule.name!r} is asynchronous, whose steps "
            "have all one size; leave it out"
        )
    samples = layout.microbatch_size * layout.microbatches_per_run * config.parallel.data
    try:
        layout.ramp.check(layout.global_batch, samples, "the samples of one run of all replicas,")
    except ConfigError as error:
        raise ConfigError(
            f"[train] batch_ramp: {error}; set train.accumulation_runs to the runs of a full batch"
        ) from error


def _require_own_updates(config: TrainConfig, layer_to_stage: Sequence[int]) -> None:
    """Refuse what an asynchronous schedule cannot have, whose stages update themselves within each run."""
    name = f"schedule.name = {config.schedule.name!r} is asynchronous: each stage is updated by itself within a run"
    if config.optimizer.clip_norm is not None:
        raise ConfigError(
            f"{name}, so there is no global gradient norm that optimizer.clip_norm = {config.optimizer.clip_norm:g} "
            "could bound; set optimizer.clip_norm to none"
        )
    if config.train.accumulation_runs != 1:
        raise ConfigError(
            f"{name}, so gradients of train.accumulation_runs = {config.train.accumulation_runs} do not accumulate; "
            "set it to 1, and schedule.microbatches and schedule.updates for the micro-batches of an update"
        )
    if config.parallel.shard_optimizer:
        raise ConfigError(
            f"{name}, while micro-batches still compute with its older weights, which a shard does not keep; set "
            "parallel.shard_optimizer to false"
        )
    if config.train.dtype == "fp16":
        raise ConfigError(
            f'{name}, so an overflow of train.dtype = "fp16" on one could not keep all from theirs; set train.dtype '
            "to bf16 or fp32"
        )
    if config.model.tied_decoder and layer_to_stage[0] != layer_to_stage[-1]:
        raise ConfigError(
            f"{name}, but the word embedding is the decoder's weight too, in stages {layer_to_stage[0]} and "
            f"{layer_to_stage[-1]}; set model.tied_decoder to false"
        )


def predicted_bubble(schedule: Schedule) -> float:
    """Return the idle share of a step with equal stages, a backward of two forwards and free messages."""
    return simulate(schedule, Costs(forward=1.0, backward=2.0)).bubble_fraction


def _schedule(options: ScheduleOptions, ranks: int) -> Schedule:
    sizes: dict[str, Any] = {
        name: value
        for name in ("microbatches", "chunks", "pairs", "unit", "waves", "updates", "memory_limit", "costs")
        if (value := getattr(options, name)) is not None
    }
    if options.name in SCHEDULES:
        if options.microbatches is None:
            raise ConfigError(
                f"schedule.microbatches is missing, which {options.name} needs; {ranks} or a multiple of it, the "
                "pipeline's ranks, keeps them all busy"
            )
        try:
            if options.costs is not None:
                sizes["costs"] = read_costs(options.costs)
            return build_schedule(options.name, ranks=ranks, **sizes)
        except UsageError as error:
            raise ConfigError(
                f"[schedule] and [parallel]: {error} (--ranks is parallel.pipeline here, the others are keys of "
                "[schedule])"
            ) from error
    if not Path(options.name).is_file():
        raise ConfigError(
            f"schedule.name = {options.name!r} is neither a schedule{nearest_names(options.name, SCHEDULES)} nor a "
            f"file; the schedules are: {', '.join(SCHEDULES)}"
        )
    if sizes:
        raise ConfigError(
            f"schedule.name = {options.name!r} is a file, which has its own sizes; leave out "
            f"schedule.{', schedule.'.join(sizes)}, or set it to none"
        )
    return read_schedule(options.name)[0]
