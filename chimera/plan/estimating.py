"""The estimate of one layout: times of its stages, through the simulator that runs everything else, and its memory.

It builds the layout's schedule, prices its stages, simulates the step (the steady state once) and adds what follows the
pipeline. It searches nothing: the layout is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chimera.errors import InfeasibleError, UsageError
from chimera.ir.action import Kind
from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.passes.reductions import places_reductions, reducing
from chimera.plan.activations import FULL, RECOMPUTE_CODES, block_activation_bytes, head_activation_bytes
from chimera.plan.closed import ModelTimes, message_bytes, model_times
from chimera.plan.dims import Dims, dims_of
from chimera.plan.estimate import Estimate, RankMemory
from chimera.plan.flops import step_flops
from chimera.plan.folding import Step, folded_step, simulated_step
from chimera.plan.forms import FormSizes, closed_form
from chimera.plan.hardware import DTYPE_BYTES, Cluster
from chimera.plan.kernels import Rates, rates_of
from chimera.plan.layers import LayerTimes, Sharing
from chimera.plan.layout import Layout
from chimera.plan.memory import margin_bytes, message_buffer_bytes, optimizer_bytes
from chimera.plan.parameters import block_parameters, embedding_parameters, head_parameters
from chimera.plan.partition import partition
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.step import Grid, gather_s, hop_times, reduction_s, tied_s, update_s
from chimera.schedules import SCHEDULES

__all__ = ["estimate", "stage_blocks"]


def estimate(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    *,
    fold: bool = True,
    block_times: Sequence[LayerTimes] | None = None,
    compiled: bool | None = None,
) -> Estimate:
    """Estimate the time and memory of one step.

    Args:
        shape: the model.
        layout: how it is spread.
        cluster: where it runs; of exactly as many devices as the layout has.
        software: the code base.
        fold: whether a long step's steady state is simulated once and repeated; the error is below 0.1 %.
        block_times: measured times of one block of each stack for one micro-batch under this layout, in place of the
            modelled ones.
        compiled: whether numba's form of the simulator runs; worth its import for many layouts. By size without.

    Raises:
        UsageError: the schedule cannot take these sizes, or the cluster has another number of devices.
        InfeasibleError: there are more stages than blocks.
    """
    if cluster.num_devices != layout.num_devices:
        raise UsageError(
            f"the layout has t·p·d = {layout.tensor}·{layout.pipeline}·{layout.data} = {layout.num_devices} devices, "
            f"the cluster {cluster.num_devices}; set --gpus {layout.num_devices}, or change one of the sizes"
        )
    parts = _Parts.of(shape, layout, cluster, software, block_times)
    costs = parts.stage_costs()
    step = _run(parts, costs, fold=fold, compiled=compiled)
    sharded = layout.sharded
    replicas = layout.data * parts.copies
    updates = parts.updates
    pipeline, after = step.compute_end, parts.reduce_s(max(parts.gradients))
    exposed = step.makespan - step.compute_end
    if updates:
        # Without a flush the next micro-batches fill what would be a bubble; every update reduces its gradients.
        pipeline, after, exposed = float(step.busy.max()), updates * after, 0.0
    elif parts.overlapped:
        after = 0.0
    tied = float(tied_s(parts.rates, parts.grid, 2 * software.reduced_bytes * parts.tied_parameters))
    heaviest = max(sum(parts.parameters[s] for s in parts.schedule.placement.stages_on(r)) for r in parts.ranks)
    update = float(update_s(parts.rates, heaviest / (replicas if sharded else 1)))
    if sharded:
        element = parts.rates.element_bytes
        update += float(gather_s(parts.rates, parts.grid, element * heaviest, replicas=float(replicas)))
    busiest = int(np.argmax(step.busy))
    return Estimate(
        shape=shape,
        layout=layout,
        cluster=cluster,
        step_s=pipeline + exposed + after + tied + update,
        pipeline_s=pipeline,
        reduce_s=exposed + after + tied,
        optimizer_s=update,
        bubble_fraction=1.0 - float(step.busy.sum()) / (layout.pipeline * pipeline),
        compute_s=parts.by_purpose(busiest, step),
        costs=costs,
        schedule=step.schedule,
        timeline=step.timeline,
        memory=parts.memory(step),
        model_flops=step_flops(shape, global_batch=layout.global_batch),
        hardware_flops=step_flops(shape, global_batch=layout.global_batch, recompute=layout.recompute),
        message_bytes=parts.sent_bytes(),
    )


def stage_blocks(shape: ModelShape, layout: Layout, num_stages: int, times: ModelTimes) -> tuple[int, ...]:
    """Return the blocks of each stage: the layout's own cut, an equal share, or the cut that balances the stages.

    Raises:
        InfeasibleError: there are more stages than blocks.
        UsageError: the layout's cut has another number of stages or of blocks.
    """
    total = shape.num_blocks
    if layout.cut is not None:
        if len(layout.cut) != num_stages or sum(layout.cut) != total:
            raise UsageError(
                f"the cut has {len(layout.cut)} stages and {sum(layout.cut)} blocks; needed: {num_stages} and {total}"
            )
        return layout.cut
    if num_stages > total:
        raise InfeasibleError(
            f"{num_stages} stages for {total} blocks; needed: one each; take fewer --pipeline ranks or --chunks"
        )
    if total % num_stages == 0 and len(times.blocks) == 1:
        return (total // num_stages,) * num_stages
    costs = [
        float(block.total_s)
        for block, count in zip(times.blocks, _blocks_of_stacks(shape), strict=True)
        for _ in range(count)
    ]
    costs[0] += float(times.embedding.total_s)
    costs[-1] += float(times.head.total_s)
    cut = partition(costs, num_stages)
    return tuple(cut.count(stage) for stage in range(num_stages))


def _blocks_of_stacks(shape: ModelShape) -> tuple[int, ...]:
    return (shape.encoder_layers, shape.layers) if shape.family == "t5" else (shape.layers,)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """One layout worked out as far as no simulation is needed."""

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
        measured: Sequence[LayerTimes] | None,
    ) -> "_Parts":
        rates = rates_of(cluster, software.dtype, float(DTYPE_BYTES[software.dtype]))
        sharing = Sharing(
            microbatch=float(layout.microbatch),
            tensor=float(layout.tensor),
            sequence_parallel=float(layout.sequence_parallel),
            recompute=float(RECOMPUTE_CODES[layout.recompute]),
            matrix_factor=software.constant("matrix_factor"),
            unaligned_penalty=software.constant("unaligned_penalty"),
        )
        stacks, vocab = dims_of(shape), software.vocab(shape.vocab, layout.tensor)
        times = model_times(
            rates,
            stacks,
            sharing,
            vocab=float(vocab),
            fused_attention=software.fused_attention,
            transform=shape.family == "bert",
        )
        if measured is not None:
            times = times._replace(blocks=tuple(measured))
        schedule = layout.build_schedule(_few(layout))
        blocks = stage_blocks(shape, layout, schedule.num_stages, times)
        per_stage = _per_stage(blocks, _blocks_of_stacks(shape))
        grid = Grid(
            tensor=float(layout.tensor),
            pipeline=float(layout.pipeline),
            data=float(layout.data),
            chunks=float(layout.chunks or 1),
            pairs=float(layout.pairs or 1),
            microbatches=float(layout.microbatches),
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
        if not self.shape.tied or self.schedule.num_stages == 1:
            return 0.0
        return self.vocab * self.shape.hidden / self.layout.tensor

    def reduce_s(self, parameters: float) -> float:
        """Return the time to reduce the gradients of some parameters of one device over their replicas."""
        size = self.software.reduced_bytes * parameters
        time = float(reduction_s(self.rates, self.grid, size, replicas=float(self.layout.data * self.copies)))
        return time / 2 if self.layout.sharded else time

    def stage_costs(self) -> StageCosts:
        """Return the costs of every stage, in seconds and bytes of one device."""
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
        kept = [
            sum(n * float(self._kept(dims)) for n, dims in zip(row, self.stacks, strict=True)) for row in self.per_stage
        ]
        kept[-1] += float(self._kept_by_head())
        return StageCosts(
            forward_s=[float(stage.forward_s) + exposed for stage in stages],
            backward_s=[float(stage.backward_s) + exposed for stage in stages],
            weight_grad_s=[float(stage.weight_grad_s) for stage in stages],
            activation_bytes=kept,
            message_bytes=[message / layout.tensor] * (len(stages) - 1),
            latency_s=factor * latency,
            bandwidth_bytes_per_s=rate / layout.tensor / factor,
            reduce_s=[self.reduce_s(count) for count in self.parameters] if self.overlapped else None,
        )

    def memory(self, step: Step) -> tuple[RankMemory, ...]:
        """Return the bytes of each rank at its peak."""
        layout, dtype = self.layout, self.software.dtype
        last = self.schedule.num_stages - 1
        message = float(message_bytes(self.rates, self.stacks, self.sharing.microbatch)) / layout.tensor
        replicas = layout.data * self.copies if layout.sharded else 1
        versions = self._weight_versions()
        made = []
        for rank in self.ranks:
            held = self.schedule.placement.stages_on(rank)
            count = sum(self.parameters[stage] for stage in held)
            parts = {
                "weights": versions * count * DTYPE_BYTES[dtype],
                "gradients": count * self.software.gradient_bytes,
                "optimizer": count * optimizer_bytes(dtype) / replicas,
                "activations": float(step.peak_bytes[rank]),
                "working": self._working(has_head=last in held),
                "buffers": float(message_buffer_bytes(message, float(layout.pipeline))),
            }
            made.append(RankMemory(**parts, margin=float(margin_bytes(sum(parts.values())))))
        return tuple(made)

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
        rest = float(step.busy[rank]) - sum(named.values())
        return {**named, "hops between chunks": max(rest, 0.0)}

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

    def _kept(self, dims: Dims) -> float:
        return float(
            block_activation_bytes(
                dims,
                microbatch=self.sharing.microbatch,
                tensor=self.sharing.tensor,
                sequence_parallel=self.sharing.sequence_parallel,
                recompute=self.sharing.recompute,
                element_bytes=self.rates.element_bytes,
                fused_attention=self.software.fused_attention,
            )
        )

    def _kept_by_head(self) -> float:
        return float(
            head_activation_bytes(
                self.stacks[-1],
                microbatch=self.sharing.microbatch,
                tensor=self.sharing.tensor,
                sequence_parallel=self.sharing.sequence_parallel,
                vocab=float(self.vocab),
            )
        )

    def _working(self, *, has_head: bool) -> float:
        """Return the bytes of one block while it is recomputed, or of the logits' gradient."""
        block = 0.0
        if self.sharing.recompute == FULL:
            block = max(
                float(
                    block_activation_bytes(
                        dims,
                        microbatch=self.sharing.microbatch,
                        tensor=self.sharing.tensor,
                        sequence_parallel=self.sharing.sequence_parallel,
                        recompute=0.0,
                        element_bytes=self.rates.element_bytes,
                        fused_attention=self.software.fused_attention,
                    )
                )
                for dims in self.stacks
            )
        tokens = self.layout.microbatch * self.shape.target_seq
        logits = 4.0 * tokens * self.vocab / self.layout.tensor if has_head else 0.0
        return max(block, logits)

    def _weight_versions(self) -> float:
        """Return the copies of a stage's weights in time, which asynchronous schedules keep."""
        if not self.updates:
            return 1.0
        sizes = FormSizes(float(self.layout.pipeline), float(self.layout.microbatches), 1.0, 1.0, 1.0, 1.0, 1.0)
        return float(closed_form(self.layout.schedule).copies(sizes))


def _few(layout: Layout) -> int:
    """Return a number of micro-batches whose schedule shows the placement, and is quickly built."""
    period = 2 * layout.pipeline
    return layout.microbatches if layout.microbatches <= 2 * period else period + layout.microbatches % period


def _run(parts: _Parts, costs: StageCosts, *, fold: bool, compiled: bool | None) -> Step:
    def build(microbatches: int) -> Schedule:
        schedule = parts.layout.build_schedule(microbatches)
        if parts.overlapped and not places_reductions(schedule):
            return reducing(schedule, "eager")
        return schedule

    # An order made for costs is another one for each m, with no steady state to repeat.
    if not fold or SCHEDULES[parts.layout.schedule].takes_costs:
        return simulated_step(build(parts.layout.microbatches), costs, compiled=compiled)
    return folded_step(build, parts.layout.microbatches, costs, ranks=parts.layout.pipeline, compiled=compiled)


def _per_stage(blocks: tuple[int, ...], stacks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return how many blocks of each stack each stage has."""
    kinds = [stack for stack, count in enumerate(stacks) for _ in range(count)]
    rows, start = [], 0
    for count in blocks:
        own = kinds[start : start + count]
        rows.append(tuple(own.count(stack) for stack in range(len(stacks))))
        start += count
    return tuple(rows)


def _sum_of(blocks: Sequence[LayerTimes], counts: Sequence[int]) -> LayerTimes:
    total = LayerTimes(0.0, 0.0, 0.0, 0.0)
    for block, count in zip(blocks, counts, strict=True):
        total = _plus(total, LayerTimes(*(count * float(time) for time in block)))
    return total


def _plus(one: LayerTimes, other: LayerTimes) -> LayerTimes:
    return LayerTimes(*(a + b for a, b in zip(one, other, strict=True)))
