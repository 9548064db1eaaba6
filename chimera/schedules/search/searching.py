"""``search``: rule after rule, the best order kept, until it meets the lower bound or the effort is spent.

Everything is decided by the question, the seed and the effort, never by the clock, so that equal calls give equal
schedules. The answer is simulated; the caller proves it, as every schedule.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Timeline
from chimera.schedules.search.bounds import Bound, Objective, lower_bound
from chimera.schedules.search.fusing import fused
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.rules import FIRST, Rule, changed, grid, shaken
from chimera.schedules.search.runner import Orders, Runner
from chimera.simulate import simulate

__all__ = ["DEFAULT_EFFORT", "Found", "search", "value_of"]

DEFAULT_EFFORT: Final = 4_000_000
"""Computations that a search puts in order, over all its rules; some seconds of compiled code."""

_FEWEST_RULES: Final = len(FIRST)
_MOST_RULES: Final = 1500
_CLOSE: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best schedule of a search.

    Attributes:
        schedule: of computations only.
        timeline: its simulation under the problem's costs.
        objective: what was minimised.
        bound: what no order can beat.
        origin: "list scheduling", "exact solver" or the name of the published schedule that was better.
        num_rules: rules tried.
        searched: the objective that list scheduling reached by itself.
        alternatives: the objective of each published schedule that was compared, by name.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    bound: Bound
    origin: str
    num_rules: int
    searched: float
    alternatives: tuple[tuple[str, float], ...] = ()

    @property
    def value(self) -> float:
        """The objective reached."""
        return value_of(self.timeline, self.objective)

    @property
    def gap(self) -> float:
        """By how much the value exceeds the bound, as a share of the bound; 0 is proved best."""
        excess = self.value - self.bound.value
        if excess <= _CLOSE * max(1.0, self.bound.value) or self.bound.value <= 0:
            return 0.0
        return excess / self.bound.value


def value_of(timeline: Timeline, objective: Objective) -> float:
    """Return a timeline's makespan or span."""
    return timeline.makespan if objective == "makespan" else timeline.span


def search(
    problem: Problem,
    *,
    objective: Objective = "makespan",
    name: str = "auto",
    seed: int = 0,
    effort: int = DEFAULT_EFFORT,
    alternatives: Iterable[Schedule] = (),
    compiled: bool | None = None,
) -> Found:
    """Find an order of the problem's computations; its B's are joined where a split gains nothing.

    Args:
        problem: placement, micro-batches, costs, cap.
        objective: ``makespan`` or ``span``.
        name: of the schedule found.
        seed: of the changes that are tried once the fixed rules are through.
        effort: computations to put in order, over all rules; the fixed first rules are always tried.
        alternatives: schedules of the same problem, asked for only if the bound is not met, that stand in where better.
        compiled: whether numba's form runs; by the work done without. It does not change the answer.

    >>> from chimera.schedules.search.placements import dealt, place
    >>> found = search(Problem.uniform(place("linear", 2), dealt(2, 1), 2.0))
    >>> found.schedule.to_text(), found.value, found.gap
    (['0F0 0F1 0B0 0B1', '1F0 1I0 1F1 1I1 1W0 1W1'], 7.0, 0.0)
    """
    bound = lower_bound(problem, objective)
    runner = Runner(problem, objective, compiled=compiled)
    best, num_rules = _best_orders(runner, bound, seed, effort)
    schedule = problem.schedule(name, best.programs(problem))
    timeline = simulate(schedule, problem.costs)
    joined = fused(problem, schedule)
    joined_timeline = simulate(joined, problem.costs)
    if value_of(joined_timeline, objective) <= value_of(timeline, objective) * (1 + _CLOSE):
        schedule, timeline = joined, joined_timeline
    found = Found(schedule, timeline, objective, bound, "list scheduling", num_rules, value_of(timeline, objective))
    return found if found.gap == 0 else _better_of(problem, found, alternatives, name)


def _best_orders(runner: Runner, bound: Bound, seed: int, effort: int) -> tuple[Orders, int]:
    """Try rules until the bound is met or the effort spent; return the best orders and the number of rules."""
    goal = bound.value * (1 + _CLOSE)
    best: Orders | None = None
    best_rule = FIRST[0]
    random = np.random.default_rng(seed)
    num_rules = min(_MOST_RULES, max(_FEWEST_RULES, effort // runner.size))
    tried = 0
    coarse = _coarse()
    while tried < num_rules and (best is None or best.value > goal):
        # After the first rules, turns between what differs from all before and what differs little from the best.
        if tried < len(FIRST) or tried % 3 == 0:
            rule = next(coarse)
        else:
            rule = changed(best_rule, random) if tried % 3 == 1 else shaken(best_rule, random)
        orders = runner.evaluate(rule)
        tried += 1
        # An equal one is taken too: from there others are near.
        if best is None or (orders.value, orders.other) <= (best.value, best.other):
            best, best_rule = orders, rule
    assert best is not None, "at least one rule is tried"
    return best, tried


def _coarse() -> Iterator[Rule]:
    yield from FIRST
    yield from islice(grid(), _MOST_RULES)


def _better_of(problem: Problem, found: Found, alternatives: Iterable[Schedule], name: str) -> Found:
    """Return ``found``, or the best alternative where that is better, with what each reached."""
    best, reached = found, []
    for schedule in alternatives:
        timeline = simulate(schedule, problem.costs)
        value = value_of(timeline, found.objective)
        reached.append((schedule.name, value))
        if value < best.value * (1 - _CLOSE):
            renamed = Schedule(
                name, schedule.placement, schedule.microbatch_to_route, schedule.actions, schedule.microbatch_share
            )
            best = Found(
                renamed, timeline, found.objective, found.bound, schedule.name, found.num_rules, found.searched
            )
    return Found(
        best.schedule, best.timeline, best.objective, best.bound, best.origin, best.num_rules, best.searched,
        tuple(reached),
    )  # fmt: skip
