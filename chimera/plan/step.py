"""The parts of a step that are not a layer's: messages, the pipeline, the reduction of gradients, the update.

The pipeline stands here in closed form for 1F1B, plain or interleaved, as all measured runs are: the fit takes it, the
estimate of one layout simulates instead. Numbers and columns alike.
"""

from typing import NamedTuple

import numpy as np

from chimera.plan.dims import Number
from chimera.plan.kernels import Rates, all_reduce_s, network_share
from chimera.plan.layers import LayerTimes

__all__ = ["Grid", "StepTimes", "gather_s", "hop_times", "pipeline_s", "reduction_s", "tied_s", "update_s"]


class Grid(NamedTuple):
    """How the devices are arranged; numbers or columns.

    Attributes:
        tensor: t.
        pipeline: p.
        data: d.
    """

    tensor: Number
    pipeline: Number
    data: Number


class StepTimes(NamedTuple):
    """Seconds of the parts of a step that follow one another."""

    pipeline_s: Number
    reduce_s: Number
    update_s: Number

    @property
    def total_s(self) -> Number:
        """Seconds of the step."""
        return self.pipeline_s + self.reduce_s + self.update_s


def hop_times(rates: Rates, grid: Grid) -> tuple[Number, Number]:
    """Return latency and rate of a message between pipeline ranks.

    The tensor-parallel ranks of a stage send a share each. Pipeline neighbours are t·d devices apart; the slowest hop
    counts for all. Within a node a message makes two ranks wait for each other as a collective does.
    """
    across = grid.tensor * grid.data * grid.pipeline > rates.node_size
    network = rates.network_rate * network_share(rates, grid.tensor)
    rate = np.where(across, network, rates.node_bytes_per_s) * grid.tensor
    latency = np.where(across, rates.hop_s, rates.collective_s)
    given = np.asarray(rates.message_bytes_per_s)
    return np.where(given > 0, 0.0, latency), np.where(given > 0, given, rate)


def pipeline_s(
    pipeline: Number,
    microbatches: Number,
    chunks: Number,
    *,
    blocks: LayerTimes,
    embedding: LayerTimes,
    head: LayerTimes,
    hop_s: Number,
) -> Number:
    """Return the time of 1F1B from the first forward to the last backward (Narayanan et al. 2021, §2.2).

    Args:
        pipeline: p.
        microbatches: m.
        chunks: v, 1 where stages are not interleaved.
        blocks: of all blocks of a rank together.
        embedding: of the embedding.
        head: of the head.
        hop_s: of one message.
    """
    p, v = np.asarray(pipeline), np.asarray(chunks)
    alone, plain = p == 1, v == 1
    middle = blocks.total_s + 2 * (v - 1) * hop_s
    ends = embedding.total_s + head.total_s
    heavier_end = np.where(alone, ends, np.maximum(embedding.total_s, head.total_s))
    # Ranks before the last wait for a round trip, shared by the micro-batches in flight (Qi et al. 2024); a last rank
    # with much more work of its own hides that.
    waiting = np.where(alone | ~plain, 0.0, 2 * (p - 1) / p * hop_s)
    heaviest = middle + np.maximum(embedding.total_s * ~alone + waiting, heavier_end)
    others = np.where(alone, 0.0, ((p - 1) * middle + ends - heavier_end) / np.maximum(p - 1, 1))
    once = np.maximum(np.where(plain, 2 * (p - 1) - 2, 2 * (p * v - 1) - p), 0.0)
    time: Number = microbatches * heaviest + (p - 1) / v * others + np.where(alone, 0.0, once * hop_s)
    return time


def reduction_s(rates: Rates, grid: Grid, gradient_bytes: Number, *, replicas: Number) -> Number:
    """Return the time to reduce a stage's gradients over its replicas; a sharded update has the same volume."""
    return all_reduce_s(rates, gradient_bytes, replicas, ranks_apart=grid.tensor)


def tied_s(rates: Rates, grid: Grid, gradient_bytes: Number) -> Number:
    """Return the time to add the gradients of a tied matrix on the first and the last rank."""
    apart = grid.tensor * grid.data * np.maximum(grid.pipeline - 1, 1)
    rate = np.where(apart >= rates.node_size, rates.network_rate, rates.node_bytes_per_s)
    time: Number = np.where(np.asarray(grid.pipeline) > 1, gradient_bytes / rate, 0.0)
    return time


def update_s(rates: Rates, parameters: Number) -> Number:
    """Return the time of the optimizer on the parameters that one device updates."""
    return parameters * rates.optimizer_bytes / rates.memory_bytes_per_s


def gather_s(rates: Rates, grid: Grid, weight_bytes: Number, *, replicas: Number) -> Number:
    """Return the time to gather the updated weights of a sharded optimizer: half of an all-reduce.

    The reduction before it is a reduce-scatter, its other half.
    """
    return all_reduce_s(rates, weight_bytes, replicas, ranks_apart=grid.tensor) / 2
