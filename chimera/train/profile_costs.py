"""What the recorded steps of a profile tell: times, messages and sizes of each stage, and the memory of each rank.

Knows what was recorded, and not how.
"""

from dataclasses import dataclass, replace

import torch

from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.tensor.parallel import TensorParallel
from chimera.timeline.costs import stage_costs
from chimera.train.config import TrainConfig
from chimera.train.families import layers_of
from chimera.train.layout import Layout
from chimera.train.link_times import ChannelTime
from chimera.train.memory import bytes_per_rank
from chimera.train.profile_result import Recording

__all__ = ["Recorded", "measured_costs", "stage_bytes", "with_links", "with_memory"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recorded steps of a run said, nothing left out of it; the same on every rank.

    Attributes:
        schedule: lowered, as it ran.
        timelines: [step][pipeline], in seconds.
        step_s: [step], on the first rank.
        message_bytes: the largest message forward over each boundary between stages.
        kept_bytes: what the forwards of each stage keep of one micro-batch.
        channels: what messages take between ranks, each pair on its own.
        reduce_s: seconds of each stage's gradient reduction.
        recording: what recording cost.
    """

    schedule: Schedule
    timelines: tuple[tuple[Timeline, ...], ...]
    step_s: tuple[float, ...]
    message_bytes: list[int]
    kept_bytes: list[int]
    channels: tuple[ChannelTime, ...]
    reduce_s: list[float]
    recording: Recording


def measured_costs(found: Recorded, config: TrainConfig, layout: Layout, given: StageCosts | None) -> StageCosts:
    """Return the measured costs, for one whole micro-batch; a virtual run has the sizes of the given ones."""
    share = layout.schedule.microbatch_share
    costs = stage_costs(
        [timeline for step in found.timelines for timeline in step],
        num_stages=layout.schedule.num_stages,
        microbatch_share=share,
    )
    if any(found.reduce_s):
        costs = replace(costs, reduce_s=found.reduce_s)
    if found.channels:
        costs = replace(
            costs,
            message_bytes=[size / share for size in found.message_bytes],
            message_s=[seconds / share for seconds in _message_s(found)],
            latency_s=max(channel.latency_s for channel in found.channels),
            bandwidth_bytes_per_s=min(channel.bytes_per_s for channel in found.channels),
        )
    if config.profile.virtual and given is not None:
        return replace(costs, gradient_bytes=given.gradient_bytes, activation_bytes=given.activation_bytes)
    sizes = stage_bytes(config, layout)
    return replace(
        costs,
        activation_bytes=[kept / share for kept in found.kept_bytes],
        weight_bytes=sizes["weight_bytes"],
        gradient_bytes=sizes["gradient_bytes"],
    )


def _message_s(found: Recorded) -> list[float]:
    """Return the time of a message at each boundary, the mean over the routes that cross it between two ranks."""
    known = {(channel.ranks, channel.route): channel for channel in found.channels}
    times = []
    for boundary, size in enumerate(found.message_bytes):
        crossing = [
            known[(min(a, b), max(a, b)), number]
            for number, route in enumerate(found.schedule.placement.routes)
            for a, b in [(route[boundary], route[boundary + 1])]
            if a != b
        ]
        each = [channel.latency_s + size / channel.bytes_per_s for channel in crossing]
        times.append(sum(each) / len(each) if each else 0.0)
    return times


def with_links(given: StageCosts, measured: StageCosts) -> StageCosts:
    """Return given costs of computations, with messages and reductions as they were measured here."""
    return replace(
        given,
        message_bytes=measured.message_bytes,
        message_s=measured.message_s,
        latency_s=measured.latency_s,
        bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s,
        reduce_s=measured.reduce_s,
    )


def stage_bytes(config: TrainConfig, layout: Layout) -> dict[str, list[float]]:
    """Return the bytes of each stage's weights and gradients, as one of the tensor-parallel ranks has them."""
    with torch.device("meta"):
        layers = layers_of(config.model, TensorParallel(0, config.parallel.tensor, config.parallel.sequence))
    width = 4 if config.train.dtype == "fp32" else 2
    elements = [0] * layout.schedule.num_stages
    for layer, stage in zip(layers, layout.layer_to_stage, strict=True):
        elements[stage] += sum(parameter.numel() for parameter in layer.parameters())
    return {"weight_bytes": [width * n for n in elements], "gradient_bytes": [4 * n for n in elements]}


def with_memory(timeline: Timeline, config: TrainConfig, layout: Layout, costs: StageCosts) -> Timeline:
    """Return a timeline that knows the bytes that its ranks hold, where they were counted."""
    if config.profile.virtual or costs.activation_bytes is None or timeline.recorded_memory is not None:
        return timeline
    with torch.device("meta"):
        layers = layers_of(config.model, TensorParallel(0, config.parallel.tensor, config.parallel.sequence))
    resolved = costs.resolve(layout.schedule)
    resident = [kept.total for kept in bytes_per_rank(config, layout, layers)]
    return replace(
        timeline, activation_bytes=resolved.activation_bytes, resident_bytes=torch.tensor(resident).double().numpy()
    )
