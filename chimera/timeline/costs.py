"""The costs of stages, read off a recorded timeline: the median time of each kind of action on each stage."""

from collections import defaultdict
from statistics import median

from chimera.errors import UsageError
from chimera.ir.action import Kind, flatten
from chimera.ir.costs import SECOND, StageCosts
from chimera.ir.timeline import Lane, Timeline

__all__ = ["stage_costs"]


def stage_costs(timeline: Timeline, *, num_stages: int, microbatch_share: float = 1.0) -> StageCosts:
    """Return the median forward and backward of each stage, in seconds for one whole micro-batch.

    Args:
        timeline: recorded, in seconds; with every stage's F and B in it.
        num_stages: stages of the schedule.
        microbatch_share: size of the recorded micro-batches as a share of whole ones.

    Raises:
        UsageError: a stage without a recorded F or B, or a timeline in model units.
    """
    if timeline.unit != SECOND:
        raise UsageError(f"{timeline.name}: costs are read off a timeline in seconds; this one is in {timeline.unit}s")
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        for span in timeline.spans(rank):
            if span.lane is Lane.COMPUTE:
                actions = list(flatten([span.action]))
                for action in actions:
                    times[action.kind, action.stage].append((span.end - span.start) / len(actions))
    missing = [f"{s}{k.name}" for k in (Kind.F, Kind.B) for s in range(num_stages) if not times[k, s]]
    if missing:
        raise UsageError(
            f"{timeline.name}: no time was recorded for {', '.join(missing)}; needed: F and B of each stage"
        )
    forward, backward = (
        [median(times[kind, stage]) / microbatch_share for stage in range(num_stages)] for kind in (Kind.F, Kind.B)
    )
    return StageCosts(forward_s=forward, backward_s=backward)
