"""The configuration of a training run: one frozen dataclass per section, joined and checked against each other.

Each part of the project has its options beside it (``[model]``, ``[data]``, ``[optimizer]``, ``[learning_rate]``); the
options of the run itself stand here. How they are read from a file and a command line is ``config_file``'s business;
what they make of a schedule is ``layout``'s.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from chimera.data import DataConfig
from chimera.errors import ConfigError, nearest_names
from chimera.models.config import TransformerConfig
from chimera.passes.reductions import ReductionMode
from chimera.plan.buffers import DEFAULT_BUCKET_BYTES
from chimera.plan.ranks import RankGrid
from chimera.tensor.recompute import RecomputeMode
from chimera.train.families import family_of
from chimera.train.loss_scale import LossScaleOptions
from chimera.train.lr_schedules import LearningRate
from chimera.train.optimizers import OptimizerConfig
from chimera.train.profile_options import ProfileOptions

__all__ = [
    "Device",
    "Dtype",
    "MetricsOptions",
    "ParallelOptions",
    "RunOptions",
    "RuntimeOptions",
    "ScheduleOptions",
    "TrainConfig",
    "Unit",
]

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
Unit = Literal["concatenate", "double", "halve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Options of the ``[schedule]`` section.

    Attributes:
        name: a schedule's name, or the path of a schedule file, which has its own sizes.
        microbatches: whole micro-batches of one run through the pipeline, over all routes.
        chunks: model chunks per rank (interleaved, looped-bfs).
        pairs: pairs of opposite pipelines (chimera).
        unit: how a step of more micro-batches than ranks is made (chimera).
        waves: times a route goes down the ranks and up again (hanayo, bitpipe).
        updates: updates of all micro-batches (pipedream-2bw).
        memory_limit: most activations per rank, in units of 1/p of the model for one micro-batch (zb-1p, zb-2p).
        costs: path of the costs file that the order is made for (zb-1p, zb-2p); F = I = W without.
        reduce: where gradient reductions start.
        recompute: what is computed again in the backward instead of kept: none, selective (the cores of attention), or
            full (whole layers, of which only the inputs are kept).
        recompute_layers: layers that are computed again at once under full.
    """

    name: str = "chimera"
    microbatches: int | None = None
    chunks: int | None = None
    pairs: int | None = None
    unit: Unit | None = None
    waves: int | None = None
    updates: int | None = None
    memory_limit: float | None = None
    costs: str | None = None
    reduce: ReductionMode = "eager-opt"
    recompute: RecomputeMode = "none"
    recompute_layers: int = 1

    def __post_init__(self) -> None:
        for option in ("microbatches", "chunks", "pairs", "waves", "updates", "recompute_layers"):
            _require_at_least(1, "schedule", option, getattr(self, option))
        _require_one_of(get_args(ReductionMode), "schedule", "reduce", self.reduce)
        _require_one_of(get_args(RecomputeMode), "schedule", "recompute", self.recompute)
        if self.recompute != "full" and self.recompute_layers != 1:
            raise ConfigError(
                f"[schedule] recompute_layers = {self.recompute_layers} has no meaning for recompute = "
                f"{self.recompute!r}; leave it out, or set recompute to full"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of the ``[parallel]`` section; the world has tensor · data · pipeline ranks.

    Attributes:
        pipeline: ranks p of one pipeline.
        data: replicas d of the whole pipeline, each on its own share of the batch.
        tensor: ranks t that share each layer; adjacent ones do.
        sequence: whether these divide the sequence between tensor-parallel regions, and so keep no activation twice.
        cut: of the layers into stages: cost (the heaviest stage as light as can be), count (numbers of blocks that
            differ by at most one), or Megatron-LM's layout, such as Ett|ttt|tL.
        shard_optimizer: whether the replicas of a stage (routes times d) each update a part of its weights, so that no
            optimizer state is kept twice.
        bucket_mib: MiB of gradients that are summed at once, while later ones are still being computed.
    """

    pipeline: int
    data: int = 1
    tensor: int = 1
    sequence: bool = False
    cut: str = "cost"
    shard_optimizer: bool = False
    bucket_mib: float = DEFAULT_BUCKET_BYTES / 2**20

    def __post_init__(self) -> None:
        if not 0.0 < self.bucket_mib < math.inf:
            raise ConfigError(f"[parallel] bucket_mib = {self.bucket_mib!r} must be a finite number above 0")
        _require_at_least(1, "parallel", "pipeline", self.pipeline)
        _require_at_least(1, "parallel", "data", self.data)
        _require_at_least(1, "parallel", "tensor", self.tensor)
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "[parallel] sequence = true has no meaning for tensor = 1, where nobody is there to divide it "
                "with; leave it out, or set tensor to 2 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of the ``[train]`` section.

    Attributes:
        steps: steps of the whole run; a resumed one goes on until this number.
        microbatch_size: samples b of a whole micro-batch.
        accumulation_runs: runs through the pipeline whose gradients make one step.
        batch_ramp: start, increment and samples of a batch that grows: from so many samples a step by equal increments,
            over so many samples of training, to the full batch; 0, 0, 0 for none.
        seed: of initial weights and dropout.
        dtype: of computation; gradients and the weights that are updated are fp32 either way. fp16 has a dynamic loss
            scale; fp8 is bf16 with the products of linear layers in float8, on GPUs that have it.
        compile: whether torch.compile makes code of each block of the model, when it first runs.
        weights: folder or file of transformers' weights (safetensors) to begin from; drawn from the seed when not
            given.
        evaluation_interval: steps between evaluations; there is one before the first step and one after the last.
        evaluation_samples: held-out samples of an evaluation, the same every time; 0 for no evaluation.
        checkpoint_interval: steps between checkpoints; there is one after the last step.
        keep_checkpoints: how many of the newest checkpoints stay.
        out: folder of the run.
    """

    steps: int
    microbatch_size: int
    out: str
    accumulation_runs: int = 1
    batch_ramp: tuple[int, int, int] = (0, 0, 0)
    seed: int = 0
    dtype: Dtype = "fp32"
    compile: bool = False
    weights: str | None = None
    evaluation_interval: int = 100
    evaluation_samples: int = 256
    checkpoint_interval: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        counts = (
            "steps",
            "microbatch_size",
            "accumulation_runs",
            "evaluation_interval",
            "checkpoint_interval",
            "keep_checkpoints",
        )
        for option in counts:
            _require_at_least(1, "train", option, getattr(self, option))
        for option in ("seed", "evaluation_samples"):
            _require_at_least(0, "train", option, getattr(self, option))
        _require_one_of(get_args(Dtype), "train", "dtype", self.dtype)
        if self.weights == "":
            raise ConfigError('[train] weights is empty; give a folder of safetensors files, or set it to "none"')
        if not self.out:
            raise ConfigError("[train] out is empty; give a folder for the run, such as runs/bert")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Options of the ``[runtime]`` section.

    Attributes:
        timeout_s: how long a rank waits for another before the job ends.
        device: where ranks compute; auto takes CUDA where there is a device.
        interface: network interface that ranks meet and talk over, by name (eth0), by an address of it, or by its
            network (10.0.0.0/8); when not given, the loopback interface where all ranks are on one host, else the one
            that leads to the first rank.
        port: of the job's store, on the first rank's host; 0 takes any that is free.
    """

    timeout_s: float = 600.0
    device: Device = "auto"
    interface: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.timeout_s < math.inf:
            raise ConfigError(f"[runtime] timeout_s = {self.timeout_s!r} must be a finite number of seconds above 0")
        _require_one_of(get_args(Device), "runtime", "device", self.device)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"[runtime] port = {self.port} must be in 0…65535; 0 takes any that is free")
        if self.interface == "":
            raise ConfigError('[runtime] interface is empty; name one, such as eth0, or set it to "none"')


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Options of the ``[metrics]`` section.

    Attributes:
        tensorboard: whether to write a TensorBoard log beside ``metrics.jsonl``.
        wandb: whether to log to Weights & Biases too; WANDB_MODE=offline keeps it on this machine.
        mlflow: whether to log to MLflow too, at MLFLOW_TRACKING_URI or into mlflow.db of the run's folder.
        project: what Weights & Biases calls the project, and MLflow the experiment.
    """

    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    project: str = "chimera"

    def __post_init__(self) -> None:
        if not self.project.strip():
            raise ConfigError('[metrics] project is empty; give a name, such as "chimera"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole training run.

    Raises:
        ConfigError: sections that contradict each other; the message names the options.
    """

    model: TransformerConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: LearningRate
    schedule: ScheduleOptions
    parallel: ParallelOptions
    train: RunOptions
    loss_scale: LossScaleOptions = field(default_factory=LossScaleOptions)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)

    def __post_init__(self) -> None:
        family = family_of(self.model)
        if self.data.samples != family.samples:
            raise ConfigError(
                f"[data] samples = {self.data.samples!r} does not fit [model] family = {self.model.family!r}; leave it "
                f"out, or set it to {family.samples!r}"
            )
        length, positions = self.data.sequence_length, self.model.max_positions
        if length > positions:
            raise ConfigError(
                f"[data] sequence_length = {length} exceeds [model] max_positions = {positions}; "
                f"set one of them to the other"
            )
        if self.data.vocab_size is not None and self.data.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"[data] vocab_size = {self.data.vocab_size} exceeds [model] vocab_size = {self.model.vocab_size}; "
                "leave [model] vocab_size out to have it follow the vocabulary, or raise it (more rows are padding)"
            )
        if self.train.dtype != "fp16" and self.loss_scale != LossScaleOptions():
            raise ConfigError(
                f"[loss_scale] is set, but [train] dtype = {self.train.dtype!r} needs no loss scale; leave the section "
                "out, or set dtype to fp16"
            )
        self._require_shares()
        samples, share = self.train.evaluation_samples, self.train.microbatch_size * self.parallel.data
        if samples % share:
            nearest = sorted({max(share, samples // share * share), -(-samples // share) * share})
            raise ConfigError(
                f"[train] evaluation_samples = {samples} does not divide into whole micro-batches of "
                f"{self.train.microbatch_size} on [parallel] data = {self.parallel.data} replicas; "
                f"try {' or '.join(map(str, nearest))}"
            )

    def _require_shares(self) -> None:
        """Refuse what tensor-parallel ranks cannot share."""
        tensor, length = self.parallel.tensor, self.data.sequence_length
        self.model.require_shares(tensor)
        if self.parallel.sequence and length % tensor:
            raise ConfigError(
                f"[data] sequence_length = {length} does not divide over [parallel] tensor = {tensor} ranks, which "
                f"sequence = true asks for; try sequence_length = {max(tensor, length // tensor * tensor)}"
            )

    @property
    def grid(self) -> RankGrid:
        """Who is who among the ranks."""
        return RankGrid(tensor=self.parallel.tensor, data=self.parallel.data, pipeline=self.parallel.pipeline)

    @property
    def bucket_bytes(self) -> int:
        """Gradients that one collective sums."""
        return round(self.parallel.bucket_mib * 2**20)

    @property
    def loss_scale_if_any(self) -> LossScaleOptions | None:
        """The options of the loss scale; None where the number format needs none."""
        return self.loss_scale if self.train.dtype == "fp16" else None

    @property
    def world_size(self) -> int:
        """Ranks of the run, t · d · p."""
        return self.grid.size


def _require_at_least(least: int, section: str, option: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ConfigError(f"[{section}] {option} = {value} must be a whole number of at least {least}")


def _require_one_of(choices: tuple[Any, ...], section: str, option: str, value: str) -> None:
    if value not in choices:
        raise ConfigError(
            f"[{section}] {option} = {value!r} is unknown{nearest_names(value, choices)}; "
            f"choose one of {', '.join(choices)}"
        )
