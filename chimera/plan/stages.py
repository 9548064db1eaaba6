"""One layout worked out as far as no simulation is needed: its placement, the times of its layers, costs of its stages.

``estimating`` simulates what stands here; ``rank_memory`` adds up what the ranks hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chimera.errors import InfeasibleError, UsageError
from chimera.ir.action import Kind
from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.plan.activations import RECOMPUTE_CODES
from chimera.plan.closed import ModelTimes, message_bytes, model_times
from chimera.plan.cutting import blocks_by_stack, stage_blocks
from chimera.plan.dims import Dims, dims_of
from chimera.plan.divisors import divisors
from chimera.plan.folding import Step
from chimera.plan.hardware import Cluster
from chimera.plan.kernels import Rates
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.layout import Layout
from chimera.plan.parameters import block_parameters, embedding_parameters, head_parameters
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.step import Grid, hop_times, reduction_s

__all__ = ["StagedLayout"]

_ROUNDING: Final = 1e-9
"""Share of a sum of times that is none."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedLayout:
    """One layout of a model, run by a code base.

    Attributes:
        shape: the model.
        layout: how it is spread.
        software: the code base.
        stacks: widths of the model's blocks.
        rates: of the cluster.
        grid: how the devices are arranged.
        sharing: how a layer is run.
        vocab: rows of the word embedding, padding included.
        times: of one layer of each kind.
        schedule: of a few micro-batches, which shows the placement.
        per_stage: [stage][stack], blocks.
        parameters: [stage], of one device.
    """

    shape: ModelShape
    layout: Layout
    software: Software
    stacks: tuple[Dims, ...]
    rates: Rates
    grid: Grid
    sharing: Sharing
    vocab: int
    times: ModelTimes
    schedule: Schedule
    per_stage: tuple[tuple[int, ...], ...]
    parameters: tuple[float, ...]

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        layout: Layout,
        cluster: Cluster,
        software: Software,
        measured: ModelTimes | None,
    ) -> "StagedLayout":
        """Work out a layout; ``measured`` times of its layers go before modelled ones.

        Raises:
            UsageError: the schedule cannot take these sizes, the layout's cut is of another model, or its t does not
                divide the model's widths.
            InfeasibleError: there are more stages than blocks.
        """
        _require_room(shape, layout)
        rates = software.rates(cluster)
        sharing = Sharing(
            microbatch=float(layout.microbatch),
            tensor=float(layout.tensor),
            sequence_parallel=float(layout.sequence_parallel),
            recompute=float(RECOMPUTE_CODES[layout.recompute]),
            matrix_factor=software.constant("matrix_factor"),
            unaligned_penalty=software.constant("unaligned_penalty"),
            accumulated_bytes=software.accumulated_bytes,
        )
        stacks, vocab = dims_of(shape), software.vocab(shape.vocab, layout.tensor)
        times = measured or model_times(
            rates,
            stacks,
            sharing,
            vocab=float(vocab),
            fused_attention=software.fused_attention,
            transform=shape.family == "bert",
        )
        schedule = layout.build_schedule(_few(layout))
        blocks = stage_blocks(shape, layout, schedule.placement, times)
        per_stage = blocks_by_stack(shape, blocks)
        grid = Grid(
            tensor=float(layout.tensor),
            pipeline=float(layout.pipeline),
            data=float(layout.data),
        )
        counts = [float(block_parameters(dims).per_rank(layout.tensor)) for dims in stacks]
        parameters = [sum(n * each for n, each in zip(row, counts, strict=True)) for row in per_stage]
        parameters[0] += float(embedding_parameters(shape, vocab=vocab).per_rank(layout.tensor))
        parameters[-1] += float(head_parameters(shape, vocab=vocab).per_rank(layout.tensor))
        if shape.tied and schedule.num_stages > 1:
            parameters[-1] += vocab * shape.hidden / layout.tensor
        return cls(
            shape=shape,
            layout=layout,
            software=software,
            stacks=stacks,
            rates=rates,
            grid=grid,
            sharing=sharing,
            vocab=vocab,
            times=times,
            schedule=schedule,
            per_stage=per_stage,
            parameters=tuple(parameters),
        )

    @property
    def ranks(self) -> range:
        """Ranks of one pipeline."""
        return range(self.layout.pipeline)

    @property
    def copies(self) -> int:
        """Ranks of the pipeline group that hold each stage."""
        return max(len(self.schedule.placement.ranks_of(stage)) for stage in range(self.schedule.num_stages))

    @property
    def overlapped(self) -> bool:
        """Whether reductions are part of the schedule."""
        return self.software.overlaps_reduction and self.layout.data * self.copies > 1 and not self.updates

    @property
    def gradients(self) -> tuple[float, ...]:
        """Parameters whose gradients each rank reduces."""
        held = (self.schedule.placement.stages_on(rank) for rank in self.ranks)
        return tuple(sum(self.parameters[stage] for stage in stages) for stages in held)

    @property
    def updates(self) -> float:
        """Updates of a step under an asynchronous schedule, 0 under a synchronous one."""
        steps = int((self.schedule.table.kind == Kind.STEP).sum())
        return steps / self.schedule.num_stages * self.layout.microbatches / self.schedule.num_microbatches

    @property
    def tied_parameters(self) -> float:
        """Parameters of one device that the first and the last rank both have."""
        if not self.shape.tied or self.schedule.num_stages == 1:
            return 0.0
        return self.vocab * self.shape.hidden / self.layout.tensor

    def reduce_s(self, parameters: float) -> float:
        """Return the time to reduce the gradients of some parameters of one device over their replicas."""
        size = self.software.reduced_bytes * parameters
        time = float(reduction_s(self.rates, self.grid, size, replicas=float(self.layout.data * self.copies)))
        return time / 2 if self.layout.sharded else time

    def stage_costs(self, activation_bytes: Sequence[float]) -> StageCosts:
        """Return the costs of every stage, in seconds and bytes of one device, given what each keeps."""
        layout, times = self.layout, self.times
        stages = [_sum_of(times.blocks, row) for row in self.per_stage]
        stages[0] = _plus(stages[0], times.embedding)
        stages[-1] = _plus(stages[-1], times.head)
        factor = self.software.constant("hop_factor")
        latency, rate = (float(value) for value in hop_times(self.rates, self.grid))
        message = float(message_bytes(self.rates, self.stacks, self.sharing.microbatch))
        # Where chunks follow one another, their hops hold up the ranks they join.
        chunks = layout.chunks or 1
        exposed = factor * (latency + message / rate) * (chunks - 1) / chunks if layout.pipeline > 1 else 0.0
        return StageCosts(
            forward_s=[float(stage.forward_s) + exposed for stage in stages],
            backward_s=[float(stage.backward_s) + exposed for stage in stages],
            weight_grad_s=[float(stage.weight_grad_s) for stage in stages],
            activation_bytes=list(activation_bytes),
            message_bytes=[message / layout.tensor] * (len(stages) - 1),
            latency_s=factor * latency,
            bandwidth_bytes_per_s=rate / layout.tensor / factor,
            reduce_s=[self.reduce_s(count) for count in self.parameters] if self.overlapped else None,
        )

    def by_purpose(self, rank: int, step: Step) -> dict[str, float]:
        """Return what the busy time of a rank goes for, over the whole step."""
        m, held = self.layout.microbatches, self.schedule.placement.stages_on(rank)
        share = m * self.schedule.microbatch_share / (max(1, self.copies))
        last = self.schedule.num_stages - 1
        blocks = [_sum_of(self.times.blocks, self.per_stage[stage]) for stage in held]
        collectives = sum(float(stage.collective_s) for stage in blocks)
        ends = (0 in held) * float(self.times.embedding.total_s) + (last in held) * float(self.times.head.total_s)
        named = {
            "blocks": share * (sum(float(stage.total_s) for stage in blocks) - collectives),
            "tensor-parallel collectives": share * collectives,
            "embedding and head": share * ends,
        }
        busy = float(step.busy[rank])
        rest = busy - sum(named.values())
        return {**named, "hops between chunks": rest if rest > _ROUNDING * busy else 0.0}

    def sent_bytes(self) -> float:
        """Return the bytes that the rank with most sends in a step's messages, per device."""
        schedule = self.schedule
        message = float(message_bytes(self.rates, self.stacks, self.sharing.microbatch)) / self.layout.tensor
        sends = [0] * schedule.num_ranks
        for route in schedule.placement.routes:
            for stage in range(schedule.num_stages - 1):
                if route[stage] != route[stage + 1]:
                    sends[route[stage]] += 1
                    sends[route[stage + 1]] += 1
        return message * max(sends) * self.layout.microbatches / len(schedule.placement.routes)


def _require_room(shape: ModelShape, layout: Layout) -> None:
    """Refuse a t that does not divide the model, and stages that it has no blocks for, before they are built."""
    if width := shape.undivided(layout.tensor):
        legal = [t for t in divisors(shape.heads) if not shape.undivided(t)]
        near = sorted(legal, key=lambda t: abs(t - layout.tensor))[:2]
        raise UsageError(
            f"--tensor {layout.tensor} does not divide the model's {width}; try --tensor "
            f"{' or '.join(map(str, sorted(near)))}"
        )
    stages = layout.pipeline * max(layout.chunks or 1, 2 * (layout.waves or 0), 1)
    if stages > shape.num_blocks:
        raise InfeasibleError(
            f"{stages} stages for {shape.num_blocks} blocks; needed: one each; take fewer --pipeline ranks, --chunks "
            "or --waves"
        )


def _few(layout: Layout) -> int:
    """Return a number of micro-batches whose schedule shows the placement, and is quickly built."""
    period = 2 * layout.pipeline
    return layout.microbatches if layout.microbatches <= 2 * period else period + layout.microbatches % period


def _sum_of(blocks: Sequence[LayerTimes], counts: Sequence[int]) -> LayerTimes:
    total = LayerTimes(0.0, 0.0, 0.0, 0.0)
    for block, count in zip(blocks, counts, strict=True):
        total = _plus(total, LayerTimes(*(count * float(time) for time in block)))
    return total


def _plus(one: LayerTimes, other: LayerTimes) -> LayerTimes:
    return LayerTimes(*(a + b for a, b in zip(one, other, strict=True)))
