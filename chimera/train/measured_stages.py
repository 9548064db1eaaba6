"""What a run's stages cost, measured one at a time, and the same program on the virtual device at that pace.

Where ranks share cores, a measured timeline shows the cores' queue rather than the schedule. Measured alone on one
rank, then waited for on all of them, the same costs show what the schedule does on a machine with a core per rank.
"""

import torch
import torch.distributed as dist

from chimera.data import MicrobatchSource, build_data
from chimera.ir.costs import StageCosts
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.passes.derived import on_one_rank
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.virtual import VirtualLoss, virtual_batch, virtual_layers
from chimera.tensor.vocabulary import Vocabulary
from chimera.timeline.costs import stage_costs
from chimera.train.config import TrainConfig
from chimera.train.families import family_of, layers_of
from chimera.train.layout import layout_of
from chimera.train.precision import in_precision, torch_dtype

__all__ = ["measure_stage_costs", "run_on_virtual_device"]

_WARM_UP_STEPS = 2
_MICROBATCHES = 12


def measure_stage_costs(config: TrainConfig) -> StageCosts:
    """Run every stage of ``config`` by turns on this process alone, with one thread, and return the median times."""
    torch.set_num_threads(1)
    layout = layout_of(config)
    serial = on_one_rank(layout.schedule, _MICROBATCHES)
    with torch.device("meta"):
        layers = layers_of(config.model)
    pipe = Pipeline(
        in_precision(layers, config.train.dtype, torch.device("cpu")),
        serial,
        family_of(config.model).loss(Vocabulary(config.model.vocab_size)),
        layer_to_stage=layout.layer_to_stage,
        recompute=config.schedule.recompute,
        recompute_layers=config.schedule.recompute_layers,
        seed=config.train.seed,
        dtype=torch_dtype(config.train.dtype),
    )
    source = MicrobatchSource(build_data(config.data).train, layout.microbatch_size, _MICROBATCHES)
    for step in range(_WARM_UP_STEPS + 1):
        microbatches = [source.microbatch(step, index) for index in range(_MICROBATCHES)]
        pipe.step(microbatches, microbatches)
    return stage_costs(
        [pipe.timeline()],
        num_stages=layout.schedule.num_stages,
        microbatch_share=layout.schedule.microbatch_share,
    )


def run_on_virtual_device(
    schedule: Schedule, costs: StageCosts, group: "dist.ProcessGroup | None", *, message_bytes: int, steps: int = 3
) -> Timeline:
    """Return the measured timeline of the median of ``steps`` on the virtual device, after one to warm up.

    A collective over ``group``, which has one rank per pipeline rank of ``schedule``.
    """
    layers = virtual_layers(costs.resolve(schedule), schedule.num_microbatches)
    pipe = Pipeline(layers, schedule, VirtualLoss(len(layers)), group)
    inputs, targets = virtual_batch(schedule.num_microbatches, message_bytes)
    timelines = []
    for _ in range(steps + 1):
        # Ranks begin together: a late start of one would pass for a bubble.
        pipe.groups.sum_everywhere(torch.zeros(1))
        pipe.step(inputs, targets)
        timelines.append(pipe.timeline())
    pipe.close()
    return sorted(timelines[1:], key=lambda timeline: timeline.makespan)[steps // 2]
