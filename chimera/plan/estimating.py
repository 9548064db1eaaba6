"""The estimate of one layout: times of its stages, through the simulator that runs everything else, and its memory.

It builds the layout's schedule, prices its stages, simulates the step (the steady state once) and adds what follows the
pipeline. It searches nothing: the layout is given.
"""

import numpy as np

from chimera.errors import UsageError
from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.passes.reductions import places_reductions, reducing
from chimera.plan.closed import ModelTimes
from chimera.plan.estimate import Estimate
from chimera.plan.flops import step_flops
from chimera.plan.folding import Step, folded_step, simulated_step
from chimera.plan.hardware import Cluster
from chimera.plan.layout import Layout
from chimera.plan.rank_memory import rank_memory, stage_activation_bytes
from chimera.plan.shape import ModelShape
from chimera.plan.software import Software
from chimera.plan.stages import StagedLayout
from chimera.plan.step import gather_s, tied_s, update_s
from chimera.schedules import SCHEDULES

__all__ = ["estimate"]


def estimate(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    *,
    fold: bool = True,
    layer_times: ModelTimes | None = None,
    compiled: bool | None = None,
) -> Estimate:
    """Estimate the time and memory of one step.

    Args:
        shape: the model.
        layout: how it is spread.
        cluster: where it runs; of exactly as many devices as the layout has.
        software: the code base.
        fold: whether a long step's steady state is simulated once and repeated; the error is below 0.1 %.
        layer_times: measured times of the layers for one micro-batch under this layout, in place of modelled ones.
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
    parts = StagedLayout.of(shape, layout, cluster, software, layer_times)
    costs = parts.stage_costs(stage_activation_bytes(parts))
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
    update *= max(updates, 1.0)
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
        memory=rank_memory(parts, step),
        model_flops=step_flops(shape, global_batch=layout.global_batch),
        hardware_flops=step_flops(shape, global_batch=layout.global_batch, recompute=layout.recompute),
        message_bytes=parts.sent_bytes(),
    )


def _run(parts: StagedLayout, costs: StageCosts, *, fold: bool, compiled: bool | None) -> Step:
    def build(microbatches: int) -> Schedule:
        schedule = parts.layout.build_schedule(microbatches)
        if parts.overlapped and not places_reductions(schedule):
            return reducing(schedule, "eager")
        return schedule

    # An order made for costs is another one for each m, with no steady state to repeat.
    if not fold or SCHEDULES[parts.layout.schedule].takes_costs:
        return simulated_step(build(parts.layout.microbatches), costs, compiled=compiled)
    return folded_step(build, parts.layout.microbatches, costs, ranks=parts.layout.pipeline, compiled=compiled)
