"""A layout: how one model is spread over a cluster and how its step is cut into micro-batches.

A layout is a choice; what it costs is ``estimate``'s answer. It knows its own arithmetic and how to build its
schedule, and refuses what could not run on any cluster.
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from chimera.errors import ConfigError, nearest_names
from chimera.ir.schedule import Schedule
from chimera.plan.shape import require_size
from chimera.schedules import build_schedule

__all__ = ["RECOMPUTES", "Layout", "Recompute"]

Recompute = Literal["none", "selective", "full"]
"""What a block runs again in its backward: nothing, its attention core (Korthikanti et al. 2022), or all of it."""

RECOMPUTES: Final[tuple[str, ...]] = get_args(Recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes t, p, d, the schedule with its own sizes, and what saves memory.

    Attributes:
        tensor: t, ranks that share each layer.
        pipeline: p, ranks of one pipeline group.
        data: d, replicas of the pipeline group.
        microbatch: b, sequences of one micro-batch.
        microbatches: m, micro-batches of one step through one pipeline group.
        schedule: a key of ``chimera.schedules.SCHEDULES``.
        chunks: v, model chunks per rank, for schedules that take it.
        pairs: f, pairs of opposite pipelines, for schedules that take it.
        waves: w, for schedules that take it.
        unit: of Chimera's steps of more than p micro-batches.
        recompute: what the backward runs again.
        sequence_parallel: whether the tensor-parallel ranks also share what lies between the sharded products.
        sharded: whether optimizer states are sharded over the replicas of a stage.
        cut: blocks of each stage; an equal share, embedding and head beside the first and last, where not given.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    microbatch: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    pairs: int | None = None
    waves: int | None = None
    unit: str | None = None
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    sharded: bool = False
    cut: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "microbatch", "microbatches"):
            require_size(name, getattr(self, name))
        if self.recompute not in RECOMPUTES:
            raise ConfigError(
                f"--recompute {self.recompute!r}{nearest_names(str(self.recompute), RECOMPUTES)}; "
                f"needed: one of {', '.join(RECOMPUTES)}"
            )
        if self.cut is not None and min(self.cut, default=0) < 0:
            raise ConfigError(f"--cut {' '.join(map(str, self.cut))}: needed: no stage with fewer than 0 blocks")

    @property
    def num_devices(self) -> int:
        """Devices t · p · d."""
        return self.tensor * self.pipeline * self.data

    @property
    def global_batch(self) -> int:
        """Sequences B = b · m · d of a step."""
        return self.microbatch * self.microbatches * self.data

    def build_schedule(self, microbatches: int | None = None) -> Schedule:
        """Build the schedule of one pipeline group; of another number of micro-batches where one is given.

        Raises:
            UsageError: the schedule is unknown or cannot take these sizes.
        """
        return build_schedule(
            self.schedule,
            ranks=self.pipeline,
            microbatches=self.microbatches if microbatches is None else microbatches,
            chunks=self.chunks,
            pairs=self.pairs,
            unit=self.unit,
            waves=self.waves,
        )
