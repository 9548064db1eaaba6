"""The costs of stages, read off recorded timelines: the median time of each action on each stage, and of pairs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from chimera.errors import UsageError
from chimera.ir.action import Kind, Overlap
from chimera.ir.costs import SECOND, PairTime, StageCosts
from chimera.ir.timeline import Lane, Span, Timeline

__all__ = ["stage_costs"]

_Times = dict[tuple[Kind, int], list[float]]


def stage_costs(timelines: Sequence[Timeline], *, num_stages: int, microbatch_share: float = 1.0) -> StageCosts:
    """Return the median time of each kind on each stage and of each pair, in seconds for one whole micro-batch.

    Half a pair's time stands for its forward and its backward only where a stage never ran one on its own. A whole
    backward that was never run is the sum of its parts. A reduction takes from the last of its ranks' starts to the
    last end: what an earlier rank waited is not its cost.

    Args:
        timelines: recorded, in seconds, of any number of steps; with every stage's forward and backward in them.
        num_stages: stages of the schedule.
        microbatch_share: size of the recorded micro-batches as a share of whole ones.

    Raises:
        UsageError: a stage without a recorded forward or backward, or a timeline in model units.
    """
    times: _Times = defaultdict(list)
    halves: _Times = defaultdict(list)
    pairs: dict[tuple[int, int, Kind], list[float]] = defaultdict(list)
    reductions: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        if timeline.unit != SECOND:
            raise UsageError(
                f"{timeline.name}: costs are read off a timeline in seconds; this one is in {timeline.unit}s"
            )
        for span in _computations(timeline):
            seconds = (span.end - span.start) / microbatch_share
            if isinstance(span.action, Overlap):
                forward, backward = span.action
                pairs[forward.stage, backward.stage, backward.kind].append(seconds)
                for half in span.action:
                    halves[half.kind, half.stage].append(seconds / 2)
            else:
                times[span.action.kind, span.action.stage].append(seconds)
        for stage, seconds in _reductions(timeline):
            reductions[stage].append(seconds)
    # A stage that runs in pairs alone says nothing of its own time but that.
    times = halves | times
    computed = _computed(times, num_stages, timelines[0].name if timelines else "no timeline")
    return StageCosts(
        forward_s=computed[Kind.F],
        backward_s=computed[Kind.B],
        input_grad_s=computed.get(Kind.I),
        weight_grad_s=computed.get(Kind.W),
        overlap_s=[PairTime(*pair, median(seconds)) for pair, seconds in sorted(pairs.items())],
        reduce_s=[median(reductions[s]) if s in reductions else 0.0 for s in range(num_stages)] if reductions else None,
    )


def _computations(timeline: Timeline) -> Iterator[Span]:
    for rank in range(timeline.num_ranks):
        yield from (span for span in timeline.spans(rank) if span.lane is Lane.COMPUTE)


def _reductions(timeline: Timeline) -> Iterator[tuple[int, float]]:
    """Yield (stage, seconds) of each reduction that several ranks made together, the n-th of a stage on each."""
    parts: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        counted: dict[int, int] = defaultdict(int)
        for span in timeline.spans(rank):
            if span.lane is Lane.REDUCE and not isinstance(span.action, Overlap):
                stage = span.action.stage
                parts[stage, counted[stage]].append(span)
                counted[stage] += 1
    for (stage, _), spans in parts.items():
        yield stage, max(0.0, max(span.end for span in spans) - max(span.start for span in spans))


def _computed(times: Mapping[tuple[Kind, int], list[float]], num_stages: int, name: str) -> dict[Kind, list[float]]:
    """Return the times of F and B by stage, and where backwards are split those of I and W."""
    stages = range(num_stages)
    known = {key: median(seconds) for key, seconds in times.items()}
    split = any((Kind.I, stage) in known for stage in stages)
    for stage in stages:
        inward, weights = known.get((Kind.I, stage)), known.get((Kind.W, stage))
        if inward is not None and weights is not None:
            known.setdefault((Kind.B, stage), inward + weights)
    missing = [f"{s}{k.name}" for k in (Kind.F, Kind.B) for s in stages if (k, s) not in known]
    if missing:
        raise UsageError(f"{name}: no time was recorded for {', '.join(missing)}; needed: F and B of each stage")
    found = {kind: [known[kind, stage] for stage in stages] for kind in (Kind.F, Kind.B)}
    if split:
        # A stage that splits nothing has no parts to tell; half each is what costs without parts say too.
        found |= {kind: [known.get((kind, s), known[Kind.B, s] / 2) for s in stages] for kind in (Kind.I, Kind.W)}
    return found
