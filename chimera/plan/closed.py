"""The layers of a model and a step of 1F1B in closed form, from widths to seconds, for one layout or columns of them.

It joins layers, pipeline, reduction and update. Nothing is scheduled or simulated here; ``estimating`` does that.
"""

from typing import NamedTuple

import numpy as np

from chimera.plan.dims import Dims, Number
from chimera.plan.kernels import Rates
from chimera.plan.layers import LayerTimes, Sharing, block_times, embedding_times, head_times
from chimera.plan.step import (
    Grid,
    StepTimes,
    hop_times,
    pipeline_s,
    reduction_s,
    tied_s,
    update_s,
)

__all__ = ["ModelTimes", "RankLoad", "closed_step", "message_bytes", "model_times"]


class ModelTimes(NamedTuple):
    """Seconds of one micro-batch: one block of each stack, the embedding, the head."""

    blocks: tuple[LayerTimes, ...]
    embedding: LayerTimes
    head: LayerTimes

    def all_blocks(self, stacks: tuple[Dims, ...], share: Number) -> LayerTimes:
        """Return the times of ``share`` of all blocks together."""
        parts = [
            LayerTimes(*(stack.blocks * share * time for time in block))
            for stack, block in zip(stacks, self.blocks, strict=True)
        ]
        return LayerTimes(*(sum(column[1:], column[0]) for column in zip(*parts, strict=True)))


class RankLoad(NamedTuple):
    """What a rank of 1F1B holds and does: numbers or columns.

    Attributes:
        share: of all blocks.
        microbatches: m.
        chunks: v.
        parameters: on one device.
        tied: parameters of a tied matrix on one device; 0 without one.
        reduced_bytes: of one gradient on its way.
        hop_factor: of the code base: how long a message holds up the pipeline, in messages.
    """

    share: Number
    microbatches: Number
    chunks: Number
    parameters: Number
    tied: Number
    reduced_bytes: Number
    hop_factor: Number


def model_times(
    rates: Rates,
    stacks: tuple[Dims, ...],
    sharing: Sharing,
    *,
    vocab: Number,
    fused_attention: bool = False,
    transform: bool = False,
) -> ModelTimes:
    """Return the times of every kind of layer of a model for one micro-batch."""
    return ModelTimes(
        blocks=tuple(block_times(rates, dims, sharing, fused_attention=fused_attention) for dims in stacks),
        embedding=embedding_times(rates, stacks[0], sharing),
        head=head_times(rates, stacks[-1], sharing, vocab=vocab, transform=transform),
    )


def message_bytes(rates: Rates, stacks: tuple[Dims, ...], microbatch: Number) -> Number:
    """Return the bytes between two stages of one micro-batch, all tensor-parallel ranks together.

    Behind a T5 encoder its result travels with the decoder's own.
    """
    tokens = stacks[0].seq + (stacks[-1].seq if len(stacks) > 1 else 0.0)
    return rates.element_bytes * microbatch * tokens * stacks[0].hidden


def closed_step(
    rates: Rates,
    stacks: tuple[Dims, ...],
    times: ModelTimes,
    *,
    microbatch: Number,
    grid: Grid,
    load: RankLoad,
) -> StepTimes:
    """Return the times of a step of 1F1B, interleaved where ``load`` has chunks."""
    latency, rate = hop_times(rates, grid)
    hop = np.where(np.asarray(grid.pipeline) > 1, latency + message_bytes(rates, stacks, microbatch) / rate, 0.0)
    pipeline = pipeline_s(
        grid.pipeline,
        load.microbatches,
        load.chunks,
        blocks=times.all_blocks(stacks, load.share),
        embedding=times.embedding,
        head=times.head,
        hop_s=hop * load.hop_factor,
    )
    reduce = reduction_s(rates, grid, load.reduced_bytes * load.parameters, replicas=grid.data)
    tied = tied_s(rates, grid, 2 * load.reduced_bytes * load.tied)
    return StepTimes(pipeline_s=pipeline, reduce_s=reduce + tied, update_s=update_s(rates, load.parameters))
