"""Time and memory of many layouts at once, before any is simulated: columns of sizes in, seconds and bytes out.

The formulas are those of the single estimate, with the pipeline in closed form and equal stages. Layers are worked out
once for each distinct way of running one. Nothing here proposes or rejects a layout.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chimera.plan.activations import FULL, block_activation_bytes, head_activation_bytes
from chimera.plan.closed import ModelTimes, RankLoad, closed_step, message_bytes, model_times
from chimera.plan.dims import Dims, dims_of
from chimera.plan.forms import ClosedForm, FormSizes, closed_form
from chimera.plan.hardware import DTYPE_BYTES, Cluster
from chimera.plan.kernels import Rates, rates_of
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.memory import margin_bytes, message_buffer_bytes, optimizer_bytes
from chimera.plan.parameters import block_parameters, embedding_parameters, head_parameters
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.step import Grid

__all__ = ["Candidates", "Figures", "estimate_many"]

_Array = NDArray[np.float64]

_CHUNK = 16384
"""Candidates worked out together: their columns stay in the processor's cache."""


class Candidates(NamedTuple):
    """Layouts under one schedule, in columns of equal length.

    Attributes:
        tensor: t.
        pipeline: p.
        data: d.
        chunks: v, or 2 w for wave placements.
        pairs: f.
        microbatch: b.
        microbatches: m.
        recompute: codes of ``activations``.
        sequence_parallel: 1 or 0.
        sharded: 1 or 0.
    """

    tensor: _Array
    pipeline: _Array
    data: _Array
    chunks: _Array
    pairs: _Array
    microbatch: _Array
    microbatches: _Array
    recompute: _Array
    sequence_parallel: _Array
    sharded: _Array


class Figures(NamedTuple):
    """Seconds of a step and bytes of the rank that holds most, per candidate."""

    step_s: _Array
    peak_bytes: _Array


def estimate_many(
    shape: ModelShape, candidates: Candidates, cluster: Cluster, software: Software, *, schedule: str
) -> Figures:
    """Estimate all candidates.

    Args:
        shape: the model.
        candidates: layouts of equal schedule.
        cluster: where they run.
        software: the code base.
        schedule: a key of ``chimera.schedules.SCHEDULES``.

    Raises:
        UsageError: the schedule is unknown.
    """
    form = closed_form(schedule)
    columns = Candidates(*(np.asarray(column, np.float64) for column in candidates))
    size = len(columns.tensor)
    parts = [
        _figures(shape, Candidates(*(column[start : start + _CHUNK] for column in columns)), cluster, software, form)
        for start in range(0, size, _CHUNK)
    ]
    if not parts:
        return Figures(np.empty(0), np.empty(0))
    return Figures(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class _Layers(NamedTuple):
    """Per distinct way of running a layer: times, kept bytes, parameters; and each candidate's index into them."""

    times: ModelTimes
    kept: _Array
    kept_by_head: _Array
    working: _Array
    block_parameters: _Array
    first: _Array
    last: _Array
    tied: _Array
    which: NDArray[np.intp]


def _figures(shape: ModelShape, columns: Candidates, cluster: Cluster, software: Software, form: ClosedForm) -> Figures:
    rates = rates_of(cluster, software.dtype, float(DTYPE_BYTES[software.dtype]))
    stacks = dims_of(shape)
    layers = _layers(shape, stacks, columns, rates, software)
    grid = Grid(
        tensor=columns.tensor,
        pipeline=columns.pipeline,
        data=columns.data,
        chunks=columns.chunks,
        pairs=columns.pairs,
        microbatches=columns.microbatches,
    )
    sizes = FormSizes(
        ranks=columns.pipeline,
        microbatches=columns.microbatches,
        chunks=columns.chunks,
        pairs=columns.pairs,
        forward=1.0,
        input_grad=1.0,
        weight_grad=1.0,
    )
    copies = np.asarray(form.copies(sizes), np.float64)
    stages = columns.pipeline * columns.chunks
    # The busiest rank has the larger share where blocks do not divide into stages.
    share = np.ceil(shape.num_blocks / stages) * columns.chunks / shape.num_blocks
    alone = columns.pipeline == 1
    first, last = layers.first[layers.which], layers.last[layers.which]
    tied = np.where(alone, 0.0, layers.tied[layers.which])
    ends = np.where(alone | (form.ends != "apart"), first + last + tied, np.maximum(first, last + tied))
    own = layers.block_parameters[layers.which] * share * shape.num_blocks
    parameters = own * copies + ends
    load = RankLoad(
        share=share,
        parameters=parameters,
        tied=tied,
        copies=copies,
        sharded=columns.sharded,
        reduced_bytes=software.reduced_bytes,
        hop_factor=software.constant("hop_factor"),
    )
    steps = closed_step(
        rates,
        stacks,
        ModelTimes(
            tuple(_spread(block, layers.which) for block in layers.times.blocks),
            _spread(layers.times.embedding, layers.which),
            _spread(layers.times.head, layers.which),
        ),
        microbatch=columns.microbatch,
        grid=grid,
        form=form,
        load=load,
    )
    in_flight = np.asarray(form.activations(sizes), np.float64)
    kept = layers.kept[layers.which] * share * in_flight
    head = np.where(form.ends == "apart", np.where(alone, 1.0, 0.0), 1.0) * layers.kept_by_head[layers.which]
    replicas = np.where(columns.sharded > 0, columns.data * copies, 1.0)
    states = DTYPE_BYTES[software.dtype] + software.gradient_bytes + optimizer_bytes(software.dtype) / replicas
    message = message_bytes(rates, stacks, columns.microbatch) / columns.tensor
    held = (
        parameters * states
        + kept
        + head
        + layers.working[layers.which]
        + message_buffer_bytes(message, columns.pipeline)
    )
    return Figures(np.asarray(steps.total_s, np.float64), np.asarray(held + margin_bytes(held), np.float64))


def _layers(
    shape: ModelShape, stacks: tuple[Dims, ...], columns: Candidates, rates: Rates, software: Software
) -> _Layers:
    """Work out each distinct way of running a layer once."""
    keys = np.stack([columns.tensor, columns.microbatch, columns.recompute, columns.sequence_parallel])
    code = np.ravel_multi_index(
        tuple(np.unique(row, return_inverse=True)[1] for row in keys), tuple(len(np.unique(row)) for row in keys)
    )
    _, where, index = np.unique(code, return_index=True, return_inverse=True)
    tensor, microbatch, recompute, sequence_parallel = keys[:, where]
    sharing = Sharing(
        microbatch,
        tensor,
        sequence_parallel,
        recompute,
        software.constant("matrix_factor"),
        software.constant("unaligned_penalty"),
    )
    vocab = np.array([float(software.vocab(shape.vocab, int(t))) for t in tensor])
    times = model_times(
        rates, stacks, sharing, vocab=vocab, fused_attention=software.fused_attention, transform=shape.family == "bert"
    )

    def kept(mode: _Array) -> _Array:
        total = sum(
            dims.blocks
            * block_activation_bytes(
                dims,
                microbatch=microbatch,
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                recompute=mode,
                element_bytes=rates.element_bytes,
                fused_attention=software.fused_attention,
            )
            for dims in stacks
        )
        return np.asarray(total, np.float64)

    head = head_activation_bytes(
        stacks[-1], microbatch=microbatch, tensor=tensor, sequence_parallel=sequence_parallel, vocab=vocab
    )
    whole_block = kept(np.zeros(len(tensor))) / shape.num_blocks
    embedding, decoder = _ends(shape, tensor, vocab)
    return _Layers(
        times=times,
        kept=kept(recompute),
        kept_by_head=np.asarray(head, np.float64),
        working=np.where(recompute == FULL, whole_block, 0.0),
        block_parameters=np.asarray(
            sum(dims.blocks * block_parameters(dims).per_rank(tensor) for dims in stacks) / shape.num_blocks, np.float64
        ),
        first=embedding,
        last=decoder,
        tied=vocab * shape.hidden / tensor * shape.tied,
        which=index,
    )


def _ends(shape: ModelShape, tensor: _Array, vocab: _Array) -> tuple[_Array, _Array]:
    """Return the parameters of embedding and head on one device."""
    embedding = [embedding_parameters(shape, vocab=int(v)).per_rank(t) for t, v in zip(tensor, vocab, strict=True)]
    head = [head_parameters(shape, vocab=int(v)).per_rank(t) for t, v in zip(tensor, vocab, strict=True)]
    return np.array(embedding, np.float64), np.array(head, np.float64)


def _spread(times: LayerTimes, index: NDArray[np.intp]) -> LayerTimes:
    return LayerTimes(*(np.broadcast_to(np.asarray(column), (index.max() + 1,))[index] for column in times))
