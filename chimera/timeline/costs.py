"""The costs of stages, read off a recorded timeline: the median time of each action on each stage, and of pairs."""

from collections import defaultdict
from statistics import median

from chimera.errors import UsageError
from chimera.ir.action import Kind, Overlap
from chimera.ir.costs import SECOND, PairTime, StageCosts
from chimera.ir.timeline import Lane, Timeline

__all__ = ["stage_costs"]


def stage_costs(timeline: Timeline, *, num_stages: int, microbatch_share: float = 1.0) -> StageCosts:
    """Return the median forward and backward of each stage and of each pair, in seconds for one whole micro-batch.

    Half a pair's time stands for its forward and its backward only where a stage never ran one on its own.

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
    halves: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    pairs: dict[tuple[int, int, Kind], list[float]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        for span in timeline.spans(rank):
            seconds = (span.end - span.start) / microbatch_share
            if span.lane is not Lane.COMPUTE:
                continue
            if isinstance(span.action, Overlap):
                forward, backward = span.action
                pairs[forward.stage, backward.stage, backward.kind].append(seconds)
                for half in span.action:
                    halves[half.kind, half.stage].append(seconds / 2)
            else:
                times[span.action.kind, span.action.stage].append(seconds)
    # A stage that runs in pairs alone says nothing of its own time but that.
    times = halves | times
    missing = [f"{s}{k.name}" for k in (Kind.F, Kind.B) for s in range(num_stages) if (k, s) not in times]
    if missing:
        raise UsageError(
            f"{timeline.name}: no time was recorded for {', '.join(missing)}; needed: F and B of each stage"
        )
    forward_s, backward_s = ([median(times[kind, stage]) for stage in range(num_stages)] for kind in (Kind.F, Kind.B))
    overlap_s = [PairTime(*pair, median(seconds)) for pair, seconds in sorted(pairs.items())]
    return StageCosts(forward_s=forward_s, backward_s=backward_s, overlap_s=overlap_s)
