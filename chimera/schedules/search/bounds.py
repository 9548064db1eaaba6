"""What no order can beat: lower bounds on makespan and span, each with its reason. docs/search.md gives the proofs.

In words. *Work*: the computations of a rank that are released at ρ or later, and after which θ must still pass
elsewhere, take ρ + their sum + θ; over all ρ and θ this is Jackson's preemptive bound of one machine, which contains
the placement's bound (earliest start + work of a rank) and the path of one micro-batch. *Memory*: a rank that may hold
c needs at least (Σ size · shortest life)/c from its first forward on, where a life counts what is held. It knows no
orders.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from chimera.schedules.search.problem import Problem

__all__ = ["Bound", "Objective", "lower_bound"]

Objective = Literal["makespan", "span"]


@dataclass(frozen=True, slots=True)
class Bound:
    """No order takes less than ``value``; ``reason`` says why in words."""

    value: float
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Paths:
    """Shortest times along the routes, all [route, stage].

    ``head``: earliest start of a forward. ``turn``: earliest start of its gradient. ``after_forward``,
    ``after_gradient``: what must pass after their ends, anywhere. ``gradient`` is the shortest time of I or B,
    ``rest`` what the backward takes on its rank besides, [stage].
    """

    head: NDArray[np.float64]
    turn: NDArray[np.float64]
    after_forward: NDArray[np.float64]
    after_gradient: NDArray[np.float64]
    gradient: NDArray[np.float64]
    rest: NDArray[np.float64]


def lower_bound(problem: Problem, objective: Objective = "makespan") -> Bound:
    """Return the largest of the bounds.

    >>> from chimera.schedules.search.placements import dealt, place
    >>> lower_bound(Problem.uniform(place("bidirectional", 8), dealt(8, 2), 8.0))
    Bound(value=27.0, reason='rank 3 cannot start before 3 and has computations of 24')
    """
    paths = _paths(problem)
    found = [each for rank in range(problem.num_ranks) for each in _of_rank(problem, paths, rank, objective)]
    # Of equal bounds the one that names most work says most.
    return max(found, key=lambda each: (each[0].value, each[1]))[0]


def _paths(problem: Problem) -> _Paths:
    forward, whole, split, weight = problem.duration
    gradient = np.minimum(split, whole)
    rest = np.minimum(whole, split + weight) - gradient
    send_f, send_b = problem.send_forward, problem.send_backward
    num_stages = problem.num_stages
    head, turn, after_forward, after_gradient = (np.zeros(problem.rank.shape) for _ in range(4))
    for stage in range(1, num_stages):
        head[:, stage] = head[:, stage - 1] + forward[stage - 1] + send_f[:, stage - 1]
    turn[:, -1] = head[:, -1] + forward[-1]
    for stage in range(num_stages - 2, -1, -1):
        turn[:, stage] = turn[:, stage + 1] + gradient[stage + 1] + send_b[:, stage + 1]
    after_gradient[:, 0] = rest[0]
    for stage in range(1, num_stages):
        onward = send_b[:, stage] + gradient[stage - 1] + after_gradient[:, stage - 1]
        after_gradient[:, stage] = np.maximum(rest[stage], onward)
    after_forward[:, -1] = gradient[-1] + after_gradient[:, -1]
    for stage in range(num_stages - 2, -1, -1):
        after_forward[:, stage] = send_f[:, stage] + forward[stage + 1] + after_forward[:, stage + 1]
    return _Paths(head, turn, after_forward, after_gradient, gradient, rest)


def _of_rank(problem: Problem, paths: _Paths, rank: int, objective: Objective) -> Iterator[tuple[Bound, float]]:
    """Yield the bounds that one rank gives, each with the work it counts; none for a rank without work."""
    lanes = np.argwhere((problem.rank == rank) & (problem.per_route > 0)[:, None])
    if not len(lanes):
        return
    route, stage = lanes.T
    count = problem.per_route[route]
    forward = problem.duration[0][stage]
    gradient, rest = paths.gradient[stage], paths.rest[stage]
    head, turn = paths.head[route, stage], paths.turn[route, stage]
    first = head.min()
    life = turn + gradient + rest - head
    if objective == "makespan":
        release = np.concatenate([head, turn, turn + gradient])
        tail = np.concatenate([paths.after_forward[route, stage], paths.after_gradient[route, stage], 0.0 * rest])
    else:
        # From the rank's own first start to its own last end: a gradient is due its lane's way after that start.
        release = np.concatenate([0.0 * head, turn - head, turn + gradient - head])
        tail = np.concatenate([life - forward, rest, 0.0 * rest])
    work = np.concatenate([count * forward, count * gradient, count * rest])
    yield _one_machine(rank, release, work, tail)
    if np.isfinite(problem.cap[rank]):
        # From the forward to the end of the gradient, then what W needs; or, with a B, to the B's end.
        _, whole, split, weight = (row[stage] for row in problem.duration)
        size, left = problem.size[stage], problem.size_after_input[stage]
        after_turn = np.minimum(size * split + left * weight, size * whole)
        area = float((count * (size * (turn - head) + after_turn)).sum())
        room = float(problem.cap[rank]) + problem.memory_tolerance
        begin = float(first) if objective == "makespan" else 0.0
        yield (
            Bound(
                begin + area / room,
                f"rank {rank} holds activations × time of {area:g} at least, within its cap of {problem.cap[rank]:g}, "
                f"and cannot start before {begin:g}",
            ),
            0.0,
        )


def _one_machine(
    rank: int, release: NDArray[np.float64], work: NDArray[np.float64], tail: NDArray[np.float64]
) -> tuple[Bound, float]:
    """Return the largest ρ + (work released at ρ or later, with tails of θ or more) + θ, and that work."""
    some = work > 0
    if not some.any():
        return Bound(0.0, f"rank {rank} has computations of no time"), 0.0
    release, work, tail = release[some], work[some], tail[some]
    best = (-1.0, 0.0, 0.0, 0.0)
    for begin in np.unique(release).tolist():
        for end in np.unique(tail).tolist():
            total = float(work[(release >= begin) & (tail >= end)].sum())
            if total:
                best = max(best, (begin + total + end, total, begin, end))
    value, total, begin, end = best
    after = f", after which {end:g} must pass" if end else ""
    if total == work.sum():
        return Bound(
            value, f"rank {rank} cannot start before {begin:g} and has computations of {total:g}{after}"
        ), total
    return Bound(value, f"rank {rank} has computations of {total:g} that cannot start before {begin:g}{after}"), total
