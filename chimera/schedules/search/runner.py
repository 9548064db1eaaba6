"""Runs rules on one problem: plain Python while the search is young, compiled code once it has gone on for a while.

Both give the same orders. Deciding by the work done, never by the clock, keeps the search deterministic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Action
from chimera.schedules.search import kernel
from chimera.schedules.search.bounds import Objective
from chimera.schedules.search.problem import KINDS, Problem
from chimera.schedules.search.rules import Rule

__all__ = ["Orders", "Runner"]

_COMPILED_AFTER: Final = 60_000
"""Placed computations from which on the import of numba, and its compilation, is worth it."""


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """What one rule made: the value of the objective, and per rank the codes of its computations in order."""

    value: float
    other: float
    kind: NDArray[np.int64]
    lane: NDArray[np.int64]
    index: NDArray[np.int64]
    bounds: tuple[tuple[int, int], ...]

    def programs(self, problem: Problem) -> tuple[tuple[Action, ...], ...]:
        """Return the orders as actions; the k-th micro-batch of a lane is the k-th of its route."""
        routes = np.array(problem.microbatch_to_route)
        of_route = [np.flatnonzero(routes == route).tolist() for route in range(len(problem.per_route))]
        programs = []
        for begin, end in self.bounds:
            columns = (column[begin:end].tolist() for column in (self.kind, self.lane, self.index))
            rows = zip(*columns, strict=True)
            program = (
                Action(KINDS[kind], problem.stage_of(lane), of_route[lane // problem.num_stages][index])
                for kind, lane, index in rows
            )
            programs.append(tuple(program))
        return tuple(programs)


class Runner:
    """Evaluates rules on a problem; ``placed`` counts the computations it has put in order so far."""

    def __init__(self, problem: Problem, objective: Objective, *, compiled: bool | None = None) -> None:
        self._objective = objective
        self._compiled = compiled
        self._admits_by_lane = problem.admits_by_lane
        self._arrays = problem.instance()
        self._lists: kernel.Instance | None = None
        self._mean_time = float(problem.duration.mean()) or 1.0
        self._places = int(self._arrays.count.sum())
        per_rank = [
            3 * int(self._arrays.count[self._arrays.lanes[a:b]].sum())
            for a, b in pairwise(self._arrays.lane_offsets.tolist())
        ]
        self._offsets = np.cumsum([0, *per_rank])
        self.placed = 0

    @property
    def size(self) -> int:
        """Computations of one order, where every backward is split."""
        return 3 * self._places

    def evaluate(self, rule: Rule) -> Orders:
        """Run one rule to the end."""
        vector = rule.vector(self._mean_time)
        if not self._admits_by_lane:
            vector[kernel.WHOLE_PATH] = 1.0
        progress = self._fresh()
        if self._use_compiled():
            _compiled_run()(self._arrays, progress, np.array(vector))
        else:
            if self._lists is None:
                columns = {k: v.tolist() for k, v in self._arrays._asdict().items() if isinstance(v, np.ndarray)}
                self._lists = self._arrays._replace(**columns)
            lists = kernel.Progress(*(column.tolist() for column in progress))
            kernel.run(self._lists, lists, vector)
            progress = kernel.Progress(*map(np.asarray, lists))
        assert (progress.weights == self._arrays.count).all(), f"the list scheduler got stuck by {rule}"
        self.placed += self.size
        worked = progress.begun_at < kernel.NEVER
        begun, ended = progress.begun_at[worked], progress.free_at[worked]
        makespan, span = float(ended.max() - begun.min()), float((ended - begun).max())
        value, other = (makespan, span) if self._objective == "makespan" else (span, makespan)
        bounds = tuple(zip(self._offsets[:-1].tolist(), progress.order_next.tolist(), strict=True))
        return Orders(value, other, progress.order_kind, progress.order_lane, progress.order_index, bounds)

    def _use_compiled(self) -> bool:
        if self._compiled is None:
            return self.placed + self.size > _COMPILED_AFTER
        return self._compiled

    def _fresh(self) -> kernel.Progress:
        p = self._arrays
        num_lanes, num_ranks = len(p.rank), p.num_ranks
        ready = np.full(self._places, kernel.NEVER)
        for lane in np.flatnonzero(p.stage == 0).tolist():
            ready[p.first[lane] : p.first[lane] + p.count[lane]] = 0.0
        lanes = [np.zeros(num_lanes, np.int64) for _ in range(3)]
        ranks = [np.zeros(num_ranks) for _ in range(4)]
        rows = [np.zeros(int(self._offsets[-1]), np.int64) for _ in range(3)]
        return kernel.Progress(
            forward_ready=ready,
            gradient_ready=np.full(self._places, kernel.NEVER),
            forwards=lanes[0],
            gradients=lanes[1],
            weights=lanes[2],
            held=ranks[0],
            promised=ranks[1],
            begun_at=np.full(num_ranks, kernel.NEVER),
            free_at=ranks[2],
            wake=ranks[3],
            order_kind=rows[0],
            order_lane=rows[1],
            order_index=rows[2],
            order_next=self._offsets[:-1].copy(),
        )


def _compiled_run() -> Callable[[kernel.Instance, kernel.Progress, Any], None]:
    from chimera.schedules.search.compiled import run

    return run
