"""What one layout of a model on a cluster is expected to cost: the values; how they come about is below."""

from collections.abc import Mapping
from dataclasses import dataclass

from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.plan.hardware import Cluster
from chimera.plan.layout import Layout
from chimera.plan.shape import ModelShape

__all__ = ["Estimate", "RankMemory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on the devices of one pipeline rank at their peak.

    Attributes:
        weights: in the number format of the products.
        gradients: as accumulated.
        optimizer: fp32 weights and both moments, the share of one device.
        activations: in flight, as the schedule holds them.
        working: the largest layer's own working set: recomputed activations, logits.
        buffers: of messages and collectives.
        margin: lost to fragmentation.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    buffers: float
    margin: float

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.working
            + self.buffers
            + self.margin
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """The expected time and memory of one step.

    Attributes:
        shape: the model.
        layout: how it is spread.
        cluster: where it runs.
        step_s: time of a step.
        pipeline_s: its part from the first forward to the last backward.
        reduce_s: its part in which gradients are reduced and nothing is computed.
        optimizer_s: its part for the update, and the gather of updated weights.
        bubble_fraction: idle share of the pipeline's part.
        compute_s: by what it goes for, the busy time of the rank that computes longest.
        costs: of the stages, as simulated.
        schedule: as simulated; of fewer micro-batches where the steady state of a long step was folded.
        timeline: of ``schedule``.
        memory: per pipeline rank.
        model_flops: of a step, without recomputation.
        hardware_flops: of a step, with it.
        message_bytes: that the rank with most sends in point-to-point messages in a step.
    """

    shape: ModelShape
    layout: Layout
    cluster: Cluster
    step_s: float
    pipeline_s: float
    reduce_s: float
    optimizer_s: float
    bubble_fraction: float
    compute_s: Mapping[str, float]
    costs: StageCosts
    schedule: Schedule
    timeline: Timeline
    memory: tuple[RankMemory, ...]
    model_flops: float
    hardware_flops: float
    message_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Of the rank that holds most."""
        return max(memory.total for memory in self.memory)

    @property
    def fits(self) -> bool:
        """Whether the rank that holds most has room."""
        return self.peak_bytes <= self.cluster.device.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all devices together."""
        return self.layout.global_batch * self.shape.seq / self.step_s

    @property
    def model_flops_per_s(self) -> float:
        """Per device, recomputation not counted."""
        return self.model_flops / self.step_s / self.layout.num_devices

    @property
    def hardware_flops_per_s(self) -> float:
        """Per device, recomputation counted."""
        return self.hardware_flops / self.step_s / self.layout.num_devices
