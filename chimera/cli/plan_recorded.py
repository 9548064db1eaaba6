"""A recorded run for the planner: its configuration says what ran, its costs or its metrics what that took.

The configuration is read by ``train``'s own reader, which knows how the run cut its model. Times become times of layers
in ``chimera.plan.recorded``.
"""

from pathlib import Path

from chimera.errors import ConfigError, UsageError
from chimera.ir.costs_file import read_costs
from chimera.plan.hardware import Cluster
from chimera.plan.layout import Layout
from chimera.plan.recorded import RecordedRun, layers_of_stages, layers_of_steps, recorded_step_s
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.stages import StagedLayout

__all__ = ["recorded_run"]

_METRICS = ".jsonl"


def recorded_run(path: Path, config: Path, shape: ModelShape, cluster: Cluster, software: Software) -> RecordedRun:
    """Return the times of the layers of the run of ``config``.

    Args:
        path: a costs file, or the run's metrics.jsonl.
        config: its configuration.
        shape: its model.
        cluster: its device and nodes; the run may have had another number of them.
        software: the code base that ran it.

    Raises:
        UsageError: ``config`` is no training configuration, or the file is of another run.
        FormatError: the file is neither a costs file nor metrics.
    """
    if config.suffix != ".toml":
        raise UsageError(f"--costs {path} is of a run, {config} of no run; needed: the run's own configuration (.toml)")
    if shape.family == "t5":
        raise UsageError("--costs: a model of family t5 has two kinds of blocks, which stages do not tell apart")
    layout, blocks = _layout_of(config, shape)
    where = Cluster.of(
        cluster.device,
        layout.num_devices,
        node_size=min(cluster.node_size, layout.num_devices),
        network_bytes_per_s=cluster.network_link.bytes_per_s * min(cluster.node_size, layout.num_devices),
        adapters=min(cluster.adapters, layout.num_devices),
    )
    if path.suffix == _METRICS:
        layers = layers_of_steps(recorded_step_s(path), shape, layout, where, software)
    else:
        modelled = StagedLayout.of(shape, layout, where, software, None).times
        layers = layers_of_stages(read_costs(path), blocks, modelled)
    return RecordedRun(
        name=path.name,
        seq=shape.seq,
        tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        microbatch=layout.microbatch,
        mode=layout.recompute,
        layers=layers,
    )


def _layout_of(config: Path, shape: ModelShape) -> tuple[Layout, tuple[int, ...]]:
    """Return the layout of a configuration, and the blocks of each of its stages."""
    # Reading a configuration needs train's types, which load torch; planning does without.
    from chimera.train.config_file import load_config
    from chimera.train.layout import layout_of

    run = load_config(config)
    made = layout_of(run)
    schedule = run.schedule
    stages = made.schedule.num_stages
    # The first layer is the embedding, the last the head.
    blocks = tuple(made.layer_to_stage[1:-1].count(stage) for stage in range(stages))
    if sum(blocks) != shape.num_blocks:
        raise ConfigError(f"{config}: cuts {sum(blocks)} blocks, the model has {shape.num_blocks}")
    return (
        Layout(
            tensor=run.parallel.tensor,
            pipeline=run.parallel.pipeline,
            data=run.parallel.data,
            microbatch=run.train.microbatch_size,
            microbatches=int(made.microbatches_per_run * made.schedule.microbatch_share),
            schedule=schedule.name,
            chunks=schedule.chunks,
            pairs=schedule.pairs,
            waves=schedule.waves,
            unit=schedule.unit,
            recompute=schedule.recompute,
            sequence_parallel=run.parallel.sequence,
            sharded=run.parallel.shard_optimizer,
            cut=blocks,
        ),
        blocks,
    )
