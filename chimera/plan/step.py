"""The time of a step from the times of its layers: pipeline, reduction of gradients, update. In closed form.

The estimate of one layout takes the same parts but simulates the pipeline; the fit and the ranking of candidates take
the closed form for it. Numbers and columns alike.
"""

from typing import NamedTuple

import numpy as np

from chimera.plan.dims import Number
from chimera.plan.forms import ClosedForm, FormSizes
from chimera.plan.kernels import Rates, all_reduce_s
from chimera.plan.layers import LayerTimes

__all__ = ["Grid", "StepTimes", "gather_s", "hop_times", "pipeline_s", "reduction_s", "tied_s", "update_s"]


class Grid(NamedTuple):
    """How the devices are arranged and how often the pipeline turns; numbers or columns.

    Attributes:
        tensor: t.
        pipeline: p.
        data: d.
        chunks: v, stages of a rank.
        pairs: f.
        microbatches: m.
    """

    tensor: Number
    pipeline: Number
    data: Number
    chunks: Number
    pairs: Number
    microbatches: Number


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
    counts for all.
    """
    across = grid.tensor * grid.data * grid.pipeline > rates.node_size
    rate = np.where(across, rates.network_rate, rates.node_bytes_per_s)
    return rates.hop_s, rate * grid.tensor


def pipeline_s(
    form: ClosedForm,
    grid: Grid,
    *,
    blocks: LayerTimes,
    embedding: LayerTimes,
    head: LayerTimes,
    hop_s: Number,
) -> Number:
    """Return the time from the first forward to the last backward.

    Args:
        form: of the schedule.
        grid: sizes.
        blocks: of all blocks of the busiest rank together.
        embedding: of the embedding.
        head: of the head.
        hop_s: of one message.
    """
    p, m = grid.pipeline, grid.microbatches
    between_chunks = np.where(np.asarray(grid.chunks) > 1, 2 * (grid.chunks - 1) * hop_s, 0.0)
    middle = blocks.total_s + between_chunks
    ends = embedding.total_s + head.total_s
    alone = np.asarray(p) == 1
    if form.ends == "apart":
        own = np.where(alone, ends, np.maximum(embedding.total_s, head.total_s))
    else:
        own = ends / np.where(alone | (form.ends == "together"), 1.0, 2.0)
    others = np.where(alone, 0.0, ((p - 1) * middle + ends - own) / np.maximum(p - 1, 1))
    scale = others / blocks.total_s
    sizes = FormSizes(
        ranks=p,
        microbatches=m,
        chunks=grid.chunks,
        pairs=grid.pairs,
        forward=blocks.forward_s * scale,
        input_grad=blocks.input_grad_s * scale,
        weight_grad=blocks.weight_grad_s * scale,
    )
    # Ranks before the last wait for a round trip, which a last rank with much more work of its own hides.
    waiting = np.where(alone, 0.0, form.steady_hops(sizes) * hop_s)
    heaviest = middle + (
        np.maximum(embedding.total_s * ~alone + waiting, own) if form.ends == "apart" else own + waiting
    )
    time: Number = m * heaviest + form.bubble(sizes) + np.where(alone, 0.0, form.hops(sizes) * hop_s)
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
    return parameters * rates.optimizer_bytes / rates.memory_rate


def gather_s(rates: Rates, grid: Grid, weight_bytes: Number, *, replicas: Number) -> Number:
    """Return the time to gather the updated weights of a sharded optimizer: half of an all-reduce.

    The reduction before it is a reduce-scatter, its other half.
    """
    return all_reduce_s(rates, weight_bytes, replicas, ranks_apart=grid.tensor) / 2
