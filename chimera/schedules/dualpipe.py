"""DualPipe and DualPipeV: forwards and backwards of opposite directions run together as overlapped pairs.

Both are one order of two directions, told by eight counts per rank; they differ in where the second direction comes
from. The module refuses to know costs, messages and reductions, and what a pair gains.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count

from chimera.errors import UsageError
from chimera.ir.action import Action, Instruction, Kind, Overlap
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Placement, Schedule
from chimera.schedules.building import nearest, require_counts, require_even_ranks, wave_route

__all__ = ["dualpipe", "dualpipev"]


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Build DualPipe: two pipelines in opposite directions, whose forwards and backwards run in pairs.

    The first half of the micro-batches goes down the ranks, the second half up.

    >>> for row in dualpipe(2, 4).to_text():
    ...     print(row)
    0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1
    0F2 1F0 0F3 1B0 (1F1;0B2)OVERLAP_F_B 1B1 0I3 0W3

    Bubble of the makespan for F = I: (p/2−1)(F&B + B − 3W), where F&B is the time of a pair whose results both come at
    its end. A pair that runs F and then B, as without an overlapped form, sends its forward on sooner, which saves half
    of the bubble at F = I = W. Activations: p + 1 at most,
    in units of one stage's activations of one micro-batch. Weights: 2 stages per rank. Needs p even, m even and
    m ≥ 2p.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv 2412.19437), §3.2.1, and the published DualPipe code.

    Args:
        ranks: pipeline ranks p, even.
        microbatches: micro-batches m per step, over both directions; even, at least 2p.

    Raises:
        UsageError: a count is below 1, p or m is odd, or m is below 2p; with the nearest that work.
    """
    require_counts("dualpipe", ranks=ranks, microbatches=microbatches)
    require_even_ranks("dualpipe", ranks)
    least = 2 * ranks
    if microbatches < least or microbatches % 2:
        legal = nearest(microbatches, {max(least, n) for n in (microbatches - 1, microbatches + 1)})
        raise UsageError(
            f"dualpipe: got --microbatches {microbatches} with --ranks {ranks}; needed: an even number of at least "
            f"2·ranks = {least}; try --microbatches {least if microbatches < least else legal}"
        )
    half = microbatches // 2
    down = tuple(range(ranks))
    with collector_paused():
        programs = []
        for rank in range(ranks):
            stages, first = (rank, ranks - 1 - rank), (0, half)
            if rank >= ranks // 2:
                # The second half of the ranks mirrors the first: the way up starts nearer to them.
                stages, first = stages[::-1], first[::-1]
            programs.append(_program(_turns(ranks // 2, min(stages), half), stages, first))
    routes = (down, down[::-1])
    return Schedule("dualpipe", Placement(ranks, routes), (0,) * half + (1,) * half, tuple(programs))


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Build DualPipeV: DualPipe cut in half and folded into a V, with a single copy of the weights.

    Every rank runs stage r on the way down and stage 2p − 1 − r on the way up; those are its two directions.

    >>> for row in dualpipev(1, 2).to_text():
    ...     print(row)
    0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1

    Bubble of the makespan for F = I: DualPipe's with p − 1 in place of p − 2, (p−1)/2 · (F&B + B − 3W) where all times
    are of 1/p of the model, on stages of half that size. Activations: p + ½ at most, in units of 1/p of the model for
    one micro-batch. Weights: 1. Needs m ≥ 2p, any p.

    Source: the published DualPipe code, 2025, after the "cut in half" of DualPipe by Sea AI Lab.

    Args:
        ranks: pipeline ranks p, two stages each.
        microbatches: micro-batches m per step, at least 2p.

    Raises:
        UsageError: a count is below 1, or m is below 2p.
    """
    require_counts("dualpipev", ranks=ranks, microbatches=microbatches)
    least = 2 * ranks
    if microbatches < least:
        raise UsageError(
            f"dualpipev: got --microbatches {microbatches} with --ranks {ranks}; needed: at least 2·ranks = {least}; "
            f"try --microbatches {least}"
        )
    with collector_paused():
        programs = tuple(
            _program(_turns(ranks, rank, microbatches), (rank, 2 * ranks - 1 - rank), (0, 0)) for rank in range(ranks)
        )
    return Schedule("dualpipev", Placement(ranks, (wave_route(ranks),)), (0,) * microbatches, programs)


_Part = tuple[Kind, int]
"""A kind and the direction it is of; W takes the oldest I that waits, of whichever direction."""

_F0, _B0, _I0 = ((kind, 0) for kind in (Kind.F, Kind.B, Kind.I))
_F1, _B1, _I1 = ((kind, 1) for kind in (Kind.F, Kind.B, Kind.I))
_W = (Kind.W, 0)


def _turns(length: int, place: int, microbatches: int) -> Iterator[tuple[_Part, ...]]:
    """Yield single parts and overlapped pairs in the order of the rank at ``place`` of ``length``.

    Direction 0 starts on the rank at place 0 and reaches the last place after ``length`` ranks; there direction 1
    comes in, and runs the other way. Each has ``microbatches``, at least 2·``length``.
    """
    behind, before = length - 1 - place, place + 1
    yield from [(_F0,)] * (2 * behind)
    yield from [(_F0,), (_F1,)] * before
    yield from [(_I1,), (_W,), (_F1,)] * behind
    steady: list[tuple[_Part, ...]] = [(_F0, _B1), (_F1, _B0)] * (microbatches - 2 * length + before)
    # The rank at the turn has the whole pipeline waiting for its first forward, so it runs that one alone.
    yield from steady if behind else [(_F0,), (_B1,), *steady[1:]]
    yield from [(_B1,), (_F1, _B0)] * behind
    both = [_B1, _B0] * before
    yield from ((part,) for part in both[:before])
    yield from ((part,) for part in ((Kind.I, direction) for _, direction in both[before:]))
    yield from [(_W,), (_I0,)] * behind
    yield from [(_W,)] * before


def _program(
    turns: Iterable[tuple[_Part, ...]], stages: tuple[int, int], first: tuple[int, int]
) -> tuple[Instruction, ...]:
    """Number the turns: direction d runs ``stages[d]`` and its micro-batches from ``first[d]``."""
    forwards, backwards = [*map(count, first)], [*map(count, first)]
    waiting: deque[Action] = deque()

    def action(kind: Kind, direction: int) -> Action:
        if kind is Kind.W:
            return waiting.popleft()._replace(kind=Kind.W)
        numbers = forwards if kind is Kind.F else backwards
        made = Action(kind, stages[direction], next(numbers[direction]))
        if kind is Kind.I:
            waiting.append(made)
        return made

    program: list[Instruction] = []
    for turn in turns:
        parts = [action(*part) for part in turn]
        program.append(Overlap(*parts) if len(parts) == 2 else parts[0])
    return tuple(program)
