"""Small problems as a constraint program: the best order with its proof, or how far from one it stopped.

Google's CP-SAT does the search (package ``ortools``, the extra ``solve``); here stands only the model. Times become
whole numbers first. One worker, a seed and a limit in the solver's deterministic time keep the answer the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from chimera.errors import UsageError
from chimera.ir.action import Action, Kind
from chimera.ir.checks import violations
from chimera.ir.schedule import Schedule
from chimera.schedules.search.bounds import Bound
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.searching import Found, value_of
from chimera.simulate import simulate

__all__ = ["DEFAULT_LIMIT", "MOST_COMPUTATIONS", "closed"]

MOST_COMPUTATIONS: Final = 1000
"""Beyond this the solver would not come near a proof."""

DEFAULT_LIMIT: Final = 30.0
"""Deterministic time, about seconds of one core."""

_FINEST: Final = 10_000
_DEMAND: Final = 1_000_000


def closed(problem: Problem, found: Found, *, limit: float = DEFAULT_LIMIT, seed: int = 0) -> Found:
    """Return ``found`` or a better schedule, with the better of its bound and the solver's.

    Args:
        problem: at most ``MOST_COMPUTATIONS`` computations, whose times are multiples of one step.
        found: what list scheduling gave; the solver starts from its value.
        limit: the solver's deterministic time.
        seed: the solver's.

    Raises:
        UsageError: ortools is not installed, the problem is too large, or its times have no common step.
    """
    model = _Model(problem, found, _scale(problem))
    status, bound = model.solve(limit, seed)
    reason = "the exact solver proved that no order is shorter" if status == "optimal" else "the exact solver's bound"
    better = max(found.bound, Bound(bound, reason), key=lambda each: each.value)
    result = replace(found, bound=better)
    if status == "none":
        return result
    schedule = model.schedule(found.schedule.name)
    timeline = simulate(schedule, problem.costs)
    # Memory was rounded in the model's favour, so the answer is asked again.
    if (
        value_of(timeline, found.objective) >= found.value
        or violations(schedule)
        or not problem.is_answered_by(schedule)
    ):
        return result
    return replace(result, schedule=schedule, timeline=timeline, origin="exact solver")


@dataclass(frozen=True, slots=True)
class _Computations:
    """The variables of one micro-batch on one stage; ``whole``: its gradient is a B; ``end``: of all three."""

    forward: Any
    gradient: Any
    gradient_end: Any
    weight: Any
    whole: Any
    end: Any


class _Model:
    """The constraint program of one problem, times in steps of 1/``scale``."""

    def __init__(self, problem: Problem, found: Found, scale: float) -> None:
        self._cp_model = _load_cp_model()
        self._problem = problem
        self._scale = scale
        self._objective = found.objective
        self._duration = np.rint(problem.duration * scale).astype(int).tolist()
        self._horizon = int(np.rint(found.timeline.makespan * scale))
        self._most = int(np.rint(found.value * scale))
        self._model = self._cp_model.CpModel()
        self._solver: Any = None
        self._computations = {
            (microbatch, stage): self._add_computations(stage)
            for microbatch in range(len(problem.microbatch_to_route))
            for stage in range(problem.num_stages)
        }
        self._add_needs()
        self._add_equal_microbatches()
        for rank in range(problem.num_ranks):
            self._add_rank(rank)
        self._add_objective()

    def solve(self, limit: float, seed: int) -> tuple[str, float]:
        """Return "optimal", "feasible" or "none", and the bound in the problem's unit."""
        solver = self._solver = self._cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = limit
        status = solver.solve(self._model)
        name = {self._cp_model.OPTIMAL: "optimal", self._cp_model.FEASIBLE: "feasible"}.get(status, "none")
        return name, solver.best_objective_bound / self._scale

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of the solver's answer."""
        rows: list[list[tuple[int, Action]]] = [[] for _ in range(self._problem.num_ranks)]
        for (microbatch, stage), own in self._computations.items():
            rank = self._rank(microbatch, stage)
            whole = own.whole is not None and self._solver.value(own.whole)
            rows[rank].append((self._solver.value(own.forward), Action(Kind.F, stage, microbatch)))
            kind = Kind.B if whole else Kind.I
            rows[rank].append((self._solver.value(own.gradient), Action(kind, stage, microbatch)))
            if not whole:
                rows[rank].append((self._solver.value(own.weight), Action(Kind.W, stage, microbatch)))
        return self._problem.schedule(name, tuple(tuple(action for _, action in sorted(row)) for row in rows))

    def _rank(self, microbatch: int, stage: int) -> int:
        return self._problem.placement.routes[self._problem.microbatch_to_route[microbatch]][stage]

    def _time(self) -> Any:
        return self._model.new_int_var(0, self._horizon, "")

    def _add_computations(self, stage: int) -> _Computations:
        """Make the variables of one micro-batch on one stage; B is a choice only where it takes less than I and W."""
        _, whole, split, weight = (row[stage] for row in self._duration)
        choice = self._model.new_bool_var("") if whole < split + weight else None
        return _Computations(self._time(), self._time(), self._time(), self._time(), choice, self._time())

    def _gradient_time(self, stage: int, own: _Computations) -> Any:
        _, whole, split, _ = (row[stage] for row in self._duration)
        return split if own.whole is None else split + (whole - split) * own.whole

    def _weight_time(self, stage: int, own: _Computations) -> Any:
        weight = self._duration[3][stage]
        return weight if own.whole is None else weight - weight * own.whole

    def _add_needs(self) -> None:
        """State the dependency relation, with the time of messages."""
        problem, model = self._problem, self._model
        forwards = np.rint(problem.send_forward * self._scale).astype(int).tolist()
        backwards = np.rint(problem.send_backward * self._scale).astype(int).tolist()
        for (microbatch, stage), own in self._computations.items():
            route = problem.microbatch_to_route[microbatch]
            forward_end = own.forward + self._duration[0][stage]
            model.add(own.gradient >= forward_end)
            model.add(own.gradient_end == own.gradient + self._gradient_time(stage, own))
            model.add(own.weight >= own.gradient_end)
            model.add(own.end == own.weight + self._weight_time(stage, own))
            if own.whole is not None:
                model.add(own.weight == own.gradient_end).only_enforce_if(own.whole)
            if stage + 1 < problem.num_stages:
                after = self._computations[microbatch, stage + 1]
                model.add(after.forward >= forward_end + forwards[route][stage])
                model.add(own.gradient >= after.gradient_end + backwards[route][stage + 1])

    def _add_equal_microbatches(self) -> None:
        """Order the micro-batches of each route, which are alike, by their first forward."""
        last: dict[int, int] = {}
        for microbatch, route in enumerate(self._problem.microbatch_to_route):
            if route in last:
                before = self._computations[last[route], 0].forward
                self._model.add(before + self._duration[0][0] <= self._computations[microbatch, 0].forward)
            last[route] = microbatch

    def _on_rank(self, rank: int) -> Iterator[tuple[int, _Computations]]:
        for (microbatch, stage), own in self._computations.items():
            if self._rank(microbatch, stage) == rank:
                yield stage, own

    def _add_rank(self, rank: int) -> None:
        """One computation at a time, and activations within the cap."""
        model, problem = self._model, self._problem
        busy, held, demands = [], [], []
        for stage, own in self._on_rank(rank):
            busy.append(model.new_fixed_size_interval_var(own.forward, self._duration[0][stage], ""))
            busy.append(model.new_interval_var(own.gradient, self._gradient_time(stage, own), own.gradient_end, ""))
            busy.append(model.new_interval_var(own.weight, self._weight_time(stage, own), own.end, ""))
            # What W needs is held to the end, the rest until the gradient is there; a B ends with its gradient.
            left = problem.size_after_input[stage]
            for size, until in ((left, own.end), (problem.size[stage] - left, own.gradient_end)):
                if size > 0:
                    life = model.new_int_var(0, self._horizon, "")
                    held.append(model.new_interval_var(own.forward, life, until, ""))
                    demands.append(int(_DEMAND * size / problem.size.max()))
        model.add_no_overlap(busy)
        cap = problem.cap[rank] + problem.memory_tolerance
        if np.isfinite(cap):
            # Rounded so that the model allows no less than the problem does; the answer is checked again.
            model.add_cumulative(held, demands, int(np.ceil(_DEMAND * cap / problem.size.max())))

    def _add_objective(self) -> None:
        goal = self._model.new_int_var(0, self._most, "")
        for rank in range(self._problem.num_ranks):
            own = [each for _, each in self._on_rank(rank)]
            begin = 0
            if self._objective == "span" and own:
                begin = self._time()
                for each in own:
                    self._model.add(begin <= each.forward)
            for each in own:
                self._model.add(goal >= each.end - begin)
        self._model.minimize(goal)


def _scale(problem: Problem) -> float:
    """Return the number of steps per unit of time that makes every time a whole number of steps."""
    count = 3 * len(problem.microbatch_to_route) * problem.num_stages
    if count > MOST_COMPUTATIONS:
        raise UsageError(
            f"--exact: got {count} computations; needed: at most {MOST_COMPUTATIONS}; leave it out, or take fewer "
            "ranks, micro-batches or chunks"
        )
    times = np.concatenate([part.ravel() for part in (problem.duration, problem.send_forward, problem.send_backward)])
    if not problem.duration.all():
        raise UsageError("--exact: a computation takes no time; needed: times above 0 for F, B, I and W of every stage")
    shortest = float(times[times > 0].min())
    for step in range(1, _FINEST + 1):
        scaled = times * (step / shortest)
        if np.abs(scaled - np.rint(scaled)).max() < 1e-6:
            return step / shortest
    raise UsageError(
        f"--exact: the times are not multiples of one step of at least 1/{_FINEST} of the shortest; round them, or "
        "leave it out"
    )


def _load_cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UsageError(
            "--exact needs the package ortools, which is not installed; needed: the extra 'solve', as in: "
            "pip install 'chimera-pipeline[solve]'"
        ) from error
    return cp_model
