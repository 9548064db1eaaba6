"""Chimera: pipelines in both directions over the same ranks, whose bubbles fill one another.

It knows the placement, the slot of every forward and backward, and how units follow one another; a rank's program is
its actions sorted by slot. It refuses to know costs, messages and reductions.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Final, Literal

from chimera.errors import UsageError, nearest_names
from chimera.ir.action import Action, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.building import nearest, require_counts, require_even_ranks

__all__ = ["UNITS", "Unit", "chimera"]

Unit = Literal["concatenate", "double", "halve"]
UNITS: Final[tuple[Unit, ...]] = ("concatenate", "double", "halve")
"""How a step of more than p micro-batches is made: direct concatenation, forward doubling, backward halving."""


def chimera(ranks: int, microbatches: int, pairs: int = 1, unit: Unit = "concatenate") -> Schedule:
    """Build Chimera's schedule with 2f = 2·``pairs`` routes, half of them down the ranks and half up.

    Down route i has stage s on rank (s + i·p/f) mod p, its up route is the mirror image. Routes 2i and 2i + 1 are
    pair i, down and up. Each unit of micro-batches is dealt to the routes in equal runs, the first ones longer by one
    where it does not divide, so that a step of fewer than p uses as many routes as it reaches.

    >>> for row in chimera(4, 4).to_text():
    ...     print(row)
    0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
    1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
    1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
    0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3

    ``unit`` says how the unit is made and repeated:

    - ``concatenate``: p micro-batches in 2p slots, equal slots for forward and backward. No idle slot between units
      when F = B.
    - ``double`` (forward doubling): 2p micro-batches in 3p slots; a slot is one backward or the forwards of two
      micro-batches. No idle slot between units when B = 2F, at up to twice the activations.
    - ``halve`` (backward halving): doubling on half micro-batches. The schedule has 2·``microbatches`` of them, each
      with ``microbatch_share`` ½, so no rank holds more than p whole ones, as with ``concatenate``.

    The last unit may be partial. Bubble as a share of the total time, for m a multiple of p: (p−2f)/(2fm+p−2f) for
    F = B; for B = 2F and m = p, (p−2f)/(3fm/2+p−2f), which is (p−2)/(3m/2+p−2) for f = 1. Activations for m = p:
    p − p/(2f) + 1 … p, in units of one stage's activations of one micro-batch, most on the ranks in the middle.
    Weights: 2f stages per rank.

    Source: Li and Hoefler, SC 2021 (arXiv 2107.06925), §3. Doubling and halving with more than one pair are ours.

    Args:
        ranks: pipeline ranks p, even.
        microbatches: whole micro-batches m per step, over all routes.
        pairs: pairs of opposite pipelines f, a divisor of p/2.
        unit: ``concatenate``, ``double`` or ``halve``.

    Raises:
        UsageError: a count is below 1, p is odd, f does not divide p/2, or the unit is unknown.
    """
    _require(ranks, microbatches, pairs, unit)
    share = 0.5 if unit == "halve" else 1.0
    width = 1 if unit == "concatenate" else 2
    count = microbatches * 2 if unit == "halve" else microbatches
    routes = _routes(ranks, pairs)
    microbatch_to_route: list[int] = []
    timetable: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    with collector_paused():
        for microbatch, (start, route, j) in enumerate(_deal(ranks, count, len(routes), width)):
            microbatch_to_route.append(route)
            for stage, rank in enumerate(routes[route]):
                forward = start + _forward_slot(stage, j, width)
                backward = start + _backward_slot(ranks, pairs, stage, j, width)
                timetable[rank].append((forward, Action(Kind.F, stage, microbatch)))
                timetable[rank].append((backward, Action(Kind.B, stage, microbatch)))
        programs = tuple(_in_order(slots) for slots in timetable)
    return Schedule("chimera", Placement(ranks, routes), tuple(microbatch_to_route), programs, share)


def _routes(ranks: int, pairs: int) -> tuple[tuple[int, ...], ...]:
    """Return down and up route of each pair in turn, as the rank of each stage."""
    routes = []
    for pair in range(pairs):
        down = [(stage + pair * ranks // pairs) % ranks for stage in range(ranks)]
        routes += [tuple(down), tuple(ranks - 1 - rank for rank in down)]
    return tuple(routes)


def _forward_slot(stage: int, j: int, width: int) -> int:
    """Slot of the forward of its route's micro-batch ``j``; ``width`` of them share one slot."""
    return stage + 2 * (j // width)


def _backward_slot(ranks: int, pairs: int, stage: int, j: int, width: int) -> int:
    """Slot of the backward; the same rule in both units, but for pairs that meet when ``width`` is 2."""
    # A doubled unit has twice the backwards per forward slot. With several pairs their runs of backwards would meet
    # on a rank; each run of p/f stages therefore waits until the run before it is through. One pair has one run.
    run = ranks // pairs
    wait = (width - 1) * run * ((ranks - 1 - stage) // run)
    return 2 * ranks - 1 - stage + 2 * j + wait


def _deal(ranks: int, count: int, num_routes: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first slot of its unit, route, index in the unit and route) for each micro-batch in turn."""
    size, period = width * ranks, (width + 1) * ranks
    for unit, first in enumerate(range(0, count, size)):
        each, longer = divmod(min(size, count - first), num_routes)
        for route in range(num_routes):
            for j in range(each + (route < longer)):
                yield unit * period, route, j


def _in_order(slots: list[tuple[int, Action]]) -> tuple[Action, ...]:
    """Sort one rank's actions by slot; the two forwards that share one keep their order."""
    return tuple(action for _, action in sorted(slots, key=itemgetter(0)))


def _require(ranks: int, microbatches: int, pairs: int, unit: str) -> None:
    """Refuse what the placement or the units cannot take, with the nearest values that they can."""
    require_counts("chimera", ranks=ranks, microbatches=microbatches, pairs=pairs)
    require_even_ranks("chimera", ranks)
    half = ranks // 2
    if half % pairs:
        legal = nearest(pairs, (n for n in range(1, half + 1) if half % n == 0))
        raise UsageError(
            f"chimera: got --pairs {pairs} with --ranks {ranks}; needed: a divisor of ranks/2 = {half}; "
            f"try --pairs {legal}"
        )
    if unit not in UNITS:
        raise UsageError(
            f"chimera: got --unit {unit!r}; needed: {', '.join(UNITS[:-1])} or {UNITS[-1]}{nearest_names(unit, UNITS)}"
        )
