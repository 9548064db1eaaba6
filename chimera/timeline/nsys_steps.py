"""Steps of training out of annotated ranges: the ``Timeline`` of each step, from one export per node.

Two vocabularies are known. Our own: ``rank 3 of pipeline 0`` around ``step 12`` around actions as text. And that of
Chimera's published code, one rank per file ``…_node<N>.sqlite``: ``call_pipeline`` around ``call_forward`` and
``call_backward``, with ``:up_pipe`` behind the name on the way up; ``recompute``, which begins the backward that
follows it; ``sync_grad`` and ``nb_sync_grad``. Names are compared whole.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from chimera.errors import FormatError, ScheduleError, UsageError
from chimera.ir.action import Action, Instruction, Kind, flatten, parse_instruction
from chimera.ir.schedule import Placement, Schedule
from chimera.ir.timeline import LANES, Lane, Timeline
from chimera.timeline.nsys import NsysExport, Range

__all__ = ["NsysSteps", "steps_of"]

_RANK: Final = re.compile(r"rank (\d+) of pipeline (\d+)")
_STEP: Final = re.compile(r"step (\d+)")
_NODE: Final = re.compile(r".*_node(\d+)")
_PUBLISHED_STEP: Final = "call_pipeline"
_UP: Final = ":up_pipe"
_PUBLISHED: Final = {"call_forward": Kind.F, "call_backward": Kind.B, "sync_grad": Kind.REDUCE_GRAD}
_PUBLISHED_ALIKE: Final = {"nb_sync_grad": "sync_grad"}
_RECOMPUTE: Final = "recompute"
_S_PER_NS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class NsysSteps:
    """What the exports of a run say.

    Attributes:
        timelines: one per step, in seconds.
        schedule: what ran, as far as it can be told; None where some rank's file is missing.
        idle_ranges: actions inside which nothing was launched; they have no span.
        pipelines: how many replicas of the pipeline the files hold.
    """

    timelines: tuple[Timeline, ...]
    schedule: Schedule | None
    idle_ranges: int
    pipelines: int


class _Part(NamedTuple):
    """One rank's part of a step: what it did, and when on its file's clock."""

    rank: int
    pipeline: int
    file: int
    start: int
    spans: list[tuple[Instruction, int, int]]


def steps_of(exports: Sequence[NsysExport], *, name: str = "nsys", pipeline: int = 0) -> NsysSteps:
    """Put the steps of all ranks of one pipeline together.

    Clocks of different files have no common zero: each file's step begins when its first rank begins it.

    Args:
        exports: one per node.
        name: of the timelines.
        pipeline: which of several replicas.

    Raises:
        UsageError: a rank is in two files, or there is no such pipeline.
        FormatError: a file without a step in it, or with names of neither vocabulary.
    """
    idle: Counter[str] = Counter()
    steps: defaultdict[int, list[_Part]] = defaultdict(list)
    known: set[int] = set()
    for file, export in enumerate(exports):
        for step, part in _parts_of(export, file, len(exports), idle):
            known.add(part.pipeline)
            if part.pipeline == pipeline:
                steps[step].append(part)
    if not steps:
        raise UsageError(
            f"--pipeline {pipeline}: the files hold {', '.join(map(str, sorted(known)))}; name one of these"
        )
    _refuse_repeats(steps, exports)
    # A step that some file was cut off in is no step of all ranks.
    whole = max(len(parts) for parts in steps.values())
    timelines = tuple(_timeline(parts, name) for _, parts in sorted(steps.items()) if len(parts) == whole)
    return NsysSteps(timelines, _schedule_of(timelines[0], name), sum(idle.values()), len(known))


def _parts_of(export: NsysExport, file: int, files: int, idle: Counter[str]) -> Iterator[tuple[int, _Part]]:
    """Yield (step, part) of a file, by whichever vocabulary its ranges have."""
    ours = [each for each in export.ranges if _STEP.fullmatch(each.name)]
    theirs = [each for each in export.ranges if each.name == _PUBLISHED_STEP]
    if ours:
        ranks = [each for each in export.ranges if _RANK.fullmatch(each.name)]
        for step in ours:
            around = [each for each in ranks if each.thread == step.thread and _holds(each, step)]
            match = _RANK.fullmatch(around[-1].name) if around else None
            rank, pipeline = (int(match[1]), int(match[2])) if match else (_node_of(export.path), 0)
            spans = _ours(_inside(export, step), idle)
            yield int(step.name.removeprefix("step ")), _Part(rank, pipeline, file, step.start, spans)
        return
    if theirs:
        rank = _node_of(export.path)
        for number, step in enumerate(theirs):
            yield number, _Part(rank, 0, file, step.start, _published(_inside(export, step), rank, files, idle))
        return
    common = ", ".join(each for each, _ in Counter(each.name for each in export.ranges).most_common(3))
    raise FormatError(
        f"{export.path} has ranges, but none called 'step N' or {_PUBLISHED_STEP!r} (it has: {common}); needed: a "
        "profile of chimera's, made by 'chimera profile CONFIG --nsys'"
    )


def _holds(outer: Range, inner: Range) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end


def _inside(export: NsysExport, step: Range) -> list[Range]:
    return [r for r in export.ranges if r.thread == step.thread and _holds(step, r) and r is not step]


def _node_of(path: Path) -> int:
    match = _NODE.fullmatch(path.stem)
    if match is None:
        raise FormatError(
            f"{path} does not say whose it is; needed: a name ending in _node0.sqlite, by the rank's number"
        )
    return int(match[1])


def _ours(ranges: Sequence[Range], idle: Counter[str]) -> list[tuple[Instruction, int, int]]:
    spans = []
    for each in ranges:
        try:
            instruction = parse_instruction(each.name)
        except FormatError:
            # Ranges of other code inside an action.
            continue
        if each.work is None:
            idle[each.name] += 1
        else:
            spans.append((instruction, *each.work))
    return spans


def _published(
    ranges: Sequence[Range], rank: int, num_ranks: int, idle: Counter[str]
) -> list[tuple[Instruction, int, int]]:
    """Number the micro-batches by their order on each of the two ways; half of them go each way where both are used."""
    both = any(each.name.endswith(_UP) for each in ranges)
    forwards = sum(_meaning(each.name) == (Kind.F, False) for each in ranges)
    seen: Counter[tuple[Kind, bool]] = Counter()
    spans: list[tuple[Instruction, int, int]] = []
    again: int | None = None
    for each in ranges:
        if each.name.removesuffix(_UP) == _RECOMPUTE:
            again = None if each.work is None else each.work[0]
            continue
        meaning = _meaning(each.name)
        if meaning is None:
            continue
        kind, up = meaning
        if kind is Kind.REDUCE_GRAD:
            # Reductions do not say of which stage: a rank's down stage comes first.
            up = both and seen[kind, False] > seen[kind, True]
        number, seen[meaning[0], up] = seen[kind, up], seen[kind, up] + 1
        stage = num_ranks - 1 - rank if up else rank
        microbatch = None if kind is Kind.REDUCE_GRAD else number + (forwards if up else 0)
        if each.work is None:
            idle[each.name] += 1
            continue
        start = again if kind is Kind.B and again is not None else each.work[0]
        again = None if kind is Kind.B else again
        spans.append((Action(kind, stage, microbatch), start, each.work[1]))
    return spans


def _meaning(name: str) -> tuple[Kind, bool] | None:
    """Return the kind that a published name stands for, and whether it is on the way up."""
    base = name.removesuffix(_UP)
    kind = _PUBLISHED.get(_PUBLISHED_ALIKE.get(base, base))
    return None if kind is None else (kind, name.endswith(_UP))


def _refuse_repeats(steps: Mapping[int, Sequence[_Part]], exports: Sequence[NsysExport]) -> None:
    for step, parts in steps.items():
        for rank, count in Counter(part.rank for part in parts).items():
            if count > 1:
                files = ", ".join(str(exports[part.file].path) for part in parts if part.rank == rank)
                raise UsageError(f"step {step} of rank {rank} is there {count} times ({files}); give each file once")


def _timeline(parts: Sequence[_Part], name: str) -> Timeline:
    zero = {file: min(part.start for part in parts if part.file == file) for file in {part.file for part in parts}}
    return Timeline.from_spans(
        [
            (part.rank, _lane(each), each, (start - zero[part.file]) * _S_PER_NS, (end - zero[part.file]) * _S_PER_NS)
            for part in parts
            for each, start, end in part.spans
        ],
        num_ranks=max(part.rank for part in parts) + 1,
        name=name,
        microbatch_to_route=_routes(_places(_spans_of(parts)))[1],
    )


def _lane(instruction: Instruction) -> Lane:
    return LANES[next(flatten([instruction])).kind]


_Places = Mapping[int, Mapping[int, int]]
"""micro-batch → stage → rank"""


def _spans_of(parts: Sequence[_Part]) -> Iterator[tuple[int, Instruction]]:
    for part in parts:
        yield from ((part.rank, instruction) for instruction, _, _ in part.spans)


def _places(spans: Iterator[tuple[int, Instruction]]) -> _Places:
    found: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for rank, instruction in spans:
        for action in flatten([instruction]):
            if LANES[action.kind] is Lane.COMPUTE and action.microbatch is not None:
                found[action.microbatch][action.stage] = rank
    return found


def _routes(places: _Places) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the different ways that micro-batches take, and the way of each, in order of the micro-batches."""
    ways: dict[tuple[int, ...], int] = {}
    of = []
    for microbatch in sorted(places):
        way = tuple(rank for _, rank in sorted(places[microbatch].items()))
        of.append(ways.setdefault(way, len(ways)))
    return list(ways), tuple(of)


def _schedule_of(timeline: Timeline, name: str) -> Schedule | None:
    """Return what ran as a schedule of computations; None where it is not whole."""
    programs: list[list[Instruction]] = [
        [span.action for span in timeline.spans(rank) if span.lane is Lane.COMPUTE]
        for rank in range(timeline.num_ranks)
    ]
    places = _places((rank, each) for rank, program in enumerate(programs) for each in program)
    routes, of = _routes(places)
    stages = range(1 + max((stage for way in places.values() for stage in way), default=-1))
    if not places or set(places) != set(range(len(places))) or any(set(way) != set(stages) for way in places.values()):
        return None
    try:
        return Schedule(
            name=name,
            placement=Placement(timeline.num_ranks, tuple(routes)),
            microbatch_to_route=of,
            actions=tuple(tuple(program) for program in programs),
        )
    except (ScheduleError, UsageError):
        return None
