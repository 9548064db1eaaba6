"""What would remove a schedule's idle time, found by trying it: each change is built, proved and simulated.

Changes of size come from the schedule's own family, or for an order of no family from the search on its placement;
split backward and more memory always come from the search, which falls back on the published schedules. Nothing is
said of a change that was not simulated; one that cannot be made is given with the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

from chimera.cli.options import with_reductions
from chimera.errors import ChimeraError
from chimera.ir.action import Kind
from chimera.ir.checks import check
from chimera.ir.costs import Costs, StageCosts
from chimera.ir.memory import peak_activations
from chimera.ir.schedule import Placement, Schedule
from chimera.ir.timeline import Timeline
from chimera.passes.derived import compute_only
from chimera.passes.reductions import ReductionMode
from chimera.schedules import SCHEDULES, build_schedule
from chimera.schedules.building import as_option
from chimera.schedules.search.placements import PLACEMENTS, dealt, place
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.published import published
from chimera.schedules.search.searching import Found, search
from chimera.simulate import simulate

__all__ = ["Family", "Refusal", "Remedy", "Subject", "family_of", "remedies"]

_EFFORT: Final = 400_000
"""Computations that one search may put in order: a tenth of what a search by itself takes."""

_MORE: Final = 2
"""By what a number is raised, or the ranks are divided."""


@dataclass(frozen=True, slots=True)
class Family:
    """The registry's schedule that another one is: its name, and its options as ``build_schedule`` takes them.

    Costs are none of its options: what is made for costs is made for those of the question.
    """

    name: str
    options: Mapping[str, int | float | str]

    def build(self, ranks: int, microbatches: int, costs: Costs | StageCosts, **changed: float) -> Schedule:
        """Build it in other sizes, for ``costs`` where it is made for some."""
        options: dict[str, Any] = {**self.options, **changed}
        if SCHEDULES[self.name].takes_costs:
            options["costs"] = costs
        return build_schedule(self.name, ranks=ranks, microbatches=microbatches, **options)

    def words(self, ranks: int, microbatches: int, **changed: float) -> str:
        """Return it as the words that a command takes."""
        sizes = {"ranks": ranks, "microbatches": microbatches, **self.options, **changed}
        return " ".join([self.name, *(f"{as_option(option)} {value}" for option, value in sizes.items())])


@dataclass(frozen=True, slots=True)
class Subject:
    """What is explained: a proved schedule of computations, its costs, its family, if it is of one, its idle share."""

    schedule: Schedule
    costs: Costs | StageCosts
    reduce: ReductionMode | None
    family: Family | None
    idle: float

    def timed(self, schedule: Schedule, costs: Costs | StageCosts | None = None) -> Timeline:
        """Prove a schedule and simulate it as the subject is: with reductions where they take time."""
        model = self.costs if costs is None else costs
        complete = with_reductions(schedule, model, self.reduce)
        check(complete)
        return simulate(complete, model)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change: what it is, the schedule that makes it as words of a command, and the step that it would give.

    Times and activations are in the units of the schedule that is explained, also for fewer ranks. ``gain`` is by how
    much the idle share falls below that of now; with more memory, below what is reached without.
    """

    change: str
    schedule: str
    idle: float
    gain: float
    makespan: float
    peak_activations: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A change that cannot be made, and why."""

    change: str
    reason: str


_Attempt = tuple[str, Callable[[], Remedy]]
"""A change and what tries it."""


def family_of(schedule: Schedule, costs: Costs | StageCosts) -> Family | None:
    """Return the family that builds just this order on this placement, None for any other order.

    >>> family_of(build_schedule("1f1b", ranks=2, microbatches=3), Costs())
    Family(name='1f1b', options={})
    """
    if schedule.is_asynchronous:
        return None
    problem = Problem(schedule.placement, schedule.microbatch_to_route, costs, None, None, schedule.microbatch_share)
    for other in published(problem):
        if other.actions == schedule.actions and other.microbatch_to_route == schedule.microbatch_to_route:
            options: dict[str, int | float | str] = {}
            if "chunks" in SCHEDULES[other.name].options:
                options["chunks"] = schedule.num_stages // schedule.num_ranks
            if "pairs" in SCHEDULES[other.name].options:
                options["pairs"] = len(schedule.placement.routes) // 2
            return Family(other.name, options)
    return None


def remedies(subject: Subject) -> Iterator[Remedy | Refusal]:
    """Try every change and yield what it gives, or why it cannot be made."""
    for change, attempt in chain(_of_size(subject), _of_cut(subject)):
        yield _tried(change, attempt)
    if subject.family is None:
        yield Refusal("fewer stages", "no published schedule has this order, so nothing says how fewer ranks go on")
    if subject.schedule.is_asynchronous:
        yield Refusal("another order", "the search makes steps with one update, and this one updates on its way")
    else:
        within = _tried("split backward", partial(_searched, subject, subject.idle))
        yield within
        reached = min(subject.idle, within.idle) if isinstance(within, Remedy) else subject.idle
        yield _tried("more memory", partial(_searched, subject, reached, memory=_MORE))


def _tried(change: str, attempt: Callable[[], Remedy]) -> Remedy | Refusal:
    try:
        return attempt()
    except ChimeraError as error:
        return Refusal(change, str(error))


def _of_size(subject: Subject) -> Iterator[_Attempt]:
    """Yield more micro-batches, and fewer stages on fewer ranks."""
    ranks, microbatches = subject.schedule.num_ranks, subject.schedule.num_microbatches
    if (family := subject.family) is not None:
        change = "more micro-batches"
        yield change, partial(_changed, subject, change, family, ranks, _MORE * microbatches)
        if ranks > 1:
            change = "fewer stages"
            yield change, partial(_changed, subject, change, family, ranks // _MORE, microbatches)
    elif not subject.schedule.is_asynchronous:
        yield "more micro-batches", partial(_searched, subject, subject.idle, microbatches=_MORE)


def _of_cut(subject: Subject) -> Iterator[_Attempt]:
    """Yield a finer cut of the model: more chunks or waves per rank, or more pairs of pipelines."""
    ranks, microbatches = subject.schedule.num_ranks, subject.schedule.num_microbatches
    family = _in_chunks(subject)
    if family is None:
        return
    for option, change, value in (
        ("chunks", "more chunks per rank", subject.schedule.num_stages // ranks),
        ("waves", "more waves", int(family.options.get("waves", 1))),
        ("pairs", "more pairs", int(family.options.get("pairs", 1))),
    ):
        if option in SCHEDULES[family.name].options:
            finer = {option: _MORE * value}
            yield change, partial(_changed, subject, change, family, ranks, microbatches, **finer)


def _in_chunks(subject: Subject) -> Family | None:
    """Return the family whose number of chunks can be raised: the subject's own, or one that it is with one chunk."""
    own, schedule = subject.family, subject.schedule
    if own is None or SCHEDULES[own.name].options or schedule.num_stages != schedule.num_ranks:
        return own
    for name, family in SCHEDULES.items():
        if "chunks" in family.options:
            whole = build_schedule(name, ranks=schedule.num_ranks, microbatches=schedule.num_microbatches, chunks=1)
            if whole.actions == schedule.actions:
                return Family(name, {})
    return own


def _changed(subject: Subject, change: str, family: Family, ranks: int, microbatches: int, **options: float) -> Remedy:
    costs, unit = _costs_on(ranks, subject)
    if "memory_limit" in family.options:
        options["memory_limit"] = float(family.options["memory_limit"]) / unit
    schedule = family.build(ranks, microbatches, costs, **options)
    timeline = subject.timed(schedule, costs)
    return _remedy(change, family.words(ranks, microbatches, **options), timeline, subject.idle, unit)


def _costs_on(ranks: int, subject: Subject) -> tuple[Costs | StageCosts, float]:
    """Return the costs on other ranks, and how many of the subject's units theirs is.

    The unit is 1/p of the model, so it grows where ranks are fewer; a message does not.
    """
    costs, unit = subject.costs, subject.schedule.num_ranks / ranks
    if isinstance(costs, StageCosts):
        return costs, 1.0
    return replace(costs, p2p=costs.p2p / unit, message_size=costs.message_size / unit), unit


def _searched(subject: Subject, against: float, *, memory: int = 1, microbatches: int = 1) -> Remedy:
    """Search the subject's placement with so many times its memory and its micro-batches."""
    schedule = subject.schedule
    routes = schedule.microbatch_to_route
    if microbatches > 1:
        routes = dealt(microbatches * len(routes), len(schedule.placement.routes))
    held = max(peak_activations(schedule))
    problem = Problem(
        schedule.placement, routes, subject.costs, memory * held, microbatch_share=schedule.microbatch_share
    )
    found = search(problem, effort=_EFFORT, alternatives=published(problem))
    timeline = subject.timed(found.schedule)
    parts = {
        "more micro-batches": microbatches > 1,
        "split backward": _is_split(found.schedule) and not _is_split(schedule),
        # An order that is better for being searched again, not for its memory, is no more than another order.
        "more memory": memory > 1
        and (timeline.bubble_fraction >= against or max(peak_activations(found.schedule)) > held * (1 + 1e-6)),
    }
    change = " and ".join(part for part, present in parts.items() if present) or "another order"
    return _remedy(change, _words(found, problem), timeline, against)


def _is_split(schedule: Schedule) -> bool:
    return bool((schedule.table.kind == Kind.I).any())


def _words(found: Found, problem: Problem) -> str:
    """Return the words of a command that give what was found: a published schedule, or the search."""
    ranks, microbatches = problem.num_ranks, len(problem.microbatch_to_route)
    if found.origin in SCHEDULES:
        family = family_of(compute_only(found.schedule), problem.costs)  # type: ignore[arg-type]  # the subject's costs
        return (family or Family(found.origin, {})).words(ranks, microbatches)
    where = _placement_words(problem.placement)
    limit = "" if problem.memory_limit is None else f" --memory-limit {problem.memory_limit:.8g}"
    return f"build auto --placement {where} --microbatches {microbatches}{limit}"


def _placement_words(placement: Placement) -> str:
    chunks = placement.num_stages // placement.num_ranks
    pairs = len(placement.routes) // 2
    for name in PLACEMENTS:
        options = {"chunks": chunks} if name == "looped" else {"pairs": pairs} if name == "bidirectional" else {}
        try:
            if place(name, placement.num_ranks, **options) == placement:
                given = "".join(f" --{option} {value}" for option, value in options.items())
                return f"{name}{given} --ranks {placement.num_ranks}"
        except ChimeraError:
            continue
    return "FILE"


def _remedy(change: str, words: str, timeline: Timeline, against: float, unit: float = 1.0) -> Remedy:
    idle, peak = timeline.bubble_fraction, max(timeline.peak_activations)
    return Remedy(change, words, idle, against - idle, timeline.makespan * unit, peak * unit)
