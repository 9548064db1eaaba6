"""The prices of choices from the planner's formulas of layers, collectives and memory, many choices at once."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from chimera.plan.activations import FULL, RECOMPUTE_CODES, block_activation_bytes, head_activation_bytes
from chimera.plan.closed import ModelTimes, message_bytes, model_times
from chimera.plan.cutting import balanced_cut
from chimera.plan.dims import Dims, dims_of
from chimera.plan.estimate import Estimate
from chimera.plan.estimating import estimate
from chimera.plan.hardware import DTYPE_BYTES, Cluster
from chimera.plan.kernels import Rates
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.layout import Layout
from chimera.plan.measured import MeasuredTimes
from chimera.plan.memory import CONTEXT_BYTES, FRAGMENTATION, optimizer_bytes
from chimera.plan.parameters import block_parameters, embedding_parameters, head_parameters
from chimera.plan.search.pricing import Choices, Floats, Prices
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.stages import StagedLayout
from chimera.plan.step import Grid, gather_s, hop_times, reduction_s, tied_s, update_s

__all__ = ["ModelPricing"]


@dataclass(frozen=True)
class ModelPricing:
    """A model on a cluster, run by a code base.

    Attributes:
        shape: the model.
        cluster: where it runs.
        software: the code base.
        measured: times of its layers in place of modelled ones; for the choices that were measured.
    """

    shape: ModelShape
    cluster: Cluster
    software: Software
    measured: MeasuredTimes | None = None
    _known: dict[Layout, Estimate] = field(default_factory=dict, repr=False, compare=False)

    def estimate(self, layout: Layout) -> Estimate:
        """Return the estimate of a layout; the same layout is simulated once."""
        if layout not in self._known:
            self._known[layout] = estimate(
                self.shape,
                layout,
                self.cluster,
                self.software,
                layer_times=self._measured_layers(layout),
                compiled=True,
            )
        return self._known[layout]

    def recut(self, layout: Layout) -> Layout:
        """Return a layout with the cut by cost in place of its own; of unlike blocks the estimate makes that itself.

        Raises:
            ChimeraError: there is no such layout, as ``estimate`` says.
        """
        layout = replace(layout, cut=None)
        if self.shape.encoder_layers:
            return layout
        parts = StagedLayout.of(self.shape, layout, self.cluster, self.software, self._measured_layers(layout))
        cut = balanced_cut(self.shape.num_blocks, parts.schedule.placement, parts.times)
        return layout if len(set(cut)) == 1 else replace(layout, cut=cut)

    def _measured_layers(self, layout: Layout) -> ModelTimes | None:
        """Return the measured times of a layout's layers, None where the model has to do."""
        if self.measured is None:
            return None
        one = np.ones((1,), np.int64)
        choices = Choices(
            tensor=one * layout.tensor,
            pipeline=one * layout.pipeline,
            data=one * layout.data,
            microbatch=one * layout.microbatch,
            routes=one,
            recompute=one * RECOMPUTE_CODES[layout.recompute],
            sequence_parallel=one > 1,
            sharded=one > 1,
        )
        times = _Work(self.shape, self.cluster, self.software, choices, self.measured).times

        def single(layer: LayerTimes) -> LayerTimes:
            return LayerTimes(*(float(np.asarray(part).ravel()[0]) for part in layer))

        return ModelTimes(tuple(map(single, times.blocks)), single(times.embedding), single(times.head))

    def prices(self, choices: Choices) -> Prices:
        """Return the prices of choices; of unlike blocks (T5) those of the mean block."""
        work = _Work(self.shape, self.cluster, self.software, choices, self.measured)
        size = np.broadcast_shapes(*(getattr(choices, name).shape for name in Choices.__slots__))

        def over(values: object) -> Floats:
            return np.broadcast_to(np.asarray(values, np.float64), size)

        def kinds(layer: LayerTimes) -> Floats:
            return np.stack([over(part) for part in (layer.forward_s, layer.input_grad_s, layer.weight_grad_s)])

        block, embedding, head = work.parameters
        state = work.state_bytes
        blocks, times = self.shape.num_blocks, work.times
        return Prices(
            block_s=kinds(times.all_blocks(work.stacks, 1.0 / blocks)),
            embedding_s=kinds(times.embedding),
            head_s=kinds(times.head),
            hop_s=over(work.hop_s),
            tail_s=over(work.tail_s),
            block_reduce_s=over(work.block_reduce_s),
            block_bytes=over(work.kept_by_blocks / blocks),
            head_bytes=over(work.kept_by_head),
            block_state_bytes=over(block * state),
            embedding_state_bytes=over(embedding * state),
            head_state_bytes=over(head * state),
            usable_bytes=over((self.cluster.device.memory_bytes - CONTEXT_BYTES) / (1 + FRAGMENTATION)),
        )


@dataclass(frozen=True)
class _Work:
    """The same parts that ``estimating`` puts together for one layout, over many choices."""

    shape: ModelShape
    cluster: Cluster
    software: Software
    choices: Choices
    measured: MeasuredTimes | None

    @cached_property
    def stacks(self) -> tuple[Dims, ...]:
        return dims_of(self.shape)

    @cached_property
    def rates(self) -> Rates:
        return self.software.rates(self.cluster)

    @cached_property
    def tensor(self) -> Floats:
        return self.choices.tensor.astype(np.float64)

    @cached_property
    def microbatch(self) -> Floats:
        return self.choices.microbatch.astype(np.float64)

    @cached_property
    def vocab(self) -> Floats:
        return _vocab(self.shape, self.software, self.tensor)

    @cached_property
    def replicas(self) -> Floats:
        return (self.choices.data * self.choices.routes).astype(np.float64)

    @cached_property
    def grid(self) -> Grid:
        pipeline, data = (size.astype(np.float64) for size in (self.choices.pipeline, self.choices.data))
        return Grid(self.tensor, pipeline, data)

    @cached_property
    def times(self) -> ModelTimes:
        sharing = Sharing(
            microbatch=self.microbatch,
            tensor=self.tensor,
            sequence_parallel=self.choices.sequence_parallel.astype(np.float64),
            recompute=self.choices.recompute.astype(np.float64),
            matrix_factor=self.software.constant("matrix_factor"),
            unaligned_penalty=self.software.constant("unaligned_penalty"),
            accumulated_bytes=self.software.accumulated_bytes,
        )
        modelled = model_times(
            self.rates,
            self.stacks,
            sharing,
            vocab=self.vocab,
            fused_attention=self.software.fused_attention,
            transform=self.shape.family == "bert",
        )
        if self.measured is None:
            return modelled
        recomputes = (self.choices.recompute == FULL).astype(np.float64)
        return self.measured.in_place_of(modelled, microbatch=self.microbatch, recomputes=recomputes)

    @cached_property
    def hop_s(self) -> Floats:
        latency, rate = hop_times(self.rates, self.grid)
        hop = latency + message_bytes(self.rates, self.stacks, self.microbatch) / rate
        return np.where(self.choices.pipeline > 1, hop * self.software.constant("hop_factor"), 0.0)

    @cached_property
    def parameters(self) -> tuple[Floats, Floats, Floats]:
        """Parameters of a block, the embedding and the head on one device."""
        t, h = self.tensor, self.shape.hidden
        blocks = np.asarray(sum(stack.blocks * block_parameters(stack).per_rank(t) for stack in self.stacks))
        # Both are linear in the words, so that padding is added.
        more = (self.vocab - self.shape.vocab) * h / t
        embedding = embedding_parameters(self.shape).per_rank(t) + more
        head = head_parameters(self.shape).per_rank(t)
        copy = np.where(self.choices.pipeline > 1, self.vocab * h / t, 0.0)
        return blocks / self.shape.num_blocks, embedding, head + (copy if self.shape.tied else more)

    @cached_property
    def state_bytes(self) -> Floats:
        """Bytes of weights, gradients and optimizer for one parameter of a device."""
        dtype = self.software.dtype
        shared = np.where(self.choices.sharded, self.replicas, 1.0)
        return DTYPE_BYTES[dtype] + self.software.gradient_bytes + optimizer_bytes(dtype) / shared

    @cached_property
    def tail_s(self) -> Floats:
        """Seconds that the update and what is not overlapped take at least; a rank has the mean of parameters."""
        block, embedding, head = self.parameters
        held = (self.shape.num_blocks * block + embedding + head) / self.choices.pipeline * self.choices.routes
        sharded, software = self.choices.sharded, self.software
        update = update_s(self.rates, held / np.where(sharded, self.replicas, 1.0))
        gathered = gather_s(self.rates, self.grid, self.rates.element_bytes * held, replicas=self.replicas)
        tail = update + np.where(sharded, gathered, 0.0)
        if self.shape.tied:
            words = self.vocab * self.shape.hidden / self.tensor
            tail = tail + tied_s(self.rates, self.grid, 2 * software.reduced_bytes * words)
        if not software.overlaps_reduction:
            reduce = reduction_s(self.rates, self.grid, software.reduced_bytes * held, replicas=self.replicas)
            tail = tail + np.where(sharded, reduce / 2, reduce)
        return np.asarray(tail, np.float64)

    @cached_property
    def block_reduce_s(self) -> Floats:
        """Seconds of the reduction of a block's gradients, latencies left out; 0 where it follows the pipeline."""
        if not self.software.overlaps_reduction:
            return np.zeros(1)
        size = self.software.reduced_bytes * self.parameters[0]
        # Twice the size less the size itself: latencies do not grow with it.
        one, two = (reduction_s(self.rates, self.grid, n * size, replicas=self.replicas) for n in (1.0, 2.0))
        return np.asarray(np.where(self.choices.sharded, (two - one) / 2, two - one), np.float64)

    @cached_property
    def kept_by_blocks(self) -> Floats:
        kept = (
            stack.blocks
            * block_activation_bytes(
                stack,
                microbatch=self.microbatch,
                tensor=self.tensor,
                sequence_parallel=self.choices.sequence_parallel.astype(np.float64),
                recompute=self.choices.recompute.astype(np.float64),
                element_bytes=self.rates.element_bytes,
                fused_attention=self.software.fused_attention,
            )
            for stack in self.stacks
        )
        return np.asarray(sum(kept), np.float64)

    @cached_property
    def kept_by_head(self) -> Floats:
        kept = head_activation_bytes(
            self.stacks[-1],
            microbatch=self.microbatch,
            tensor=self.tensor,
            sequence_parallel=self.choices.sequence_parallel.astype(np.float64),
            vocab=self.vocab,
        )
        return np.asarray(kept, np.float64)


def _vocab(shape: ModelShape, software: Software, tensor: Floats) -> Floats:
    """Return the rows of the word embedding, padding included."""
    if software.vocab_multiple is None:
        return shape.vocab // tensor * tensor
    step = software.vocab_multiple * tensor
    return np.ceil(shape.vocab / step) * step
