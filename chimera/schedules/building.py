"""What the schedule functions share: checked counts, actions in bulk, and the one-forward-one-backward merge.

It knows no schedule. Options are named as the command line names them, so that an error says what to change.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter

from chimera.errors import UsageError
from chimera.ir.action import Action, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Placement

__all__ = [
    "actions",
    "as_option",
    "linear",
    "merge_1f1b",
    "nearest",
    "require_counts",
    "require_even_ranks",
    "slot_programs",
    "wave_route",
]


def require_counts(schedule: str, **counts: int) -> None:
    """Refuse any count that is not a whole number of at least 1; the keyword is the option's name.

    >>> require_counts("gpipe", ranks=0)
    Traceback (most recent call last):
    chimera.errors.UsageError: gpipe: got --ranks 0; needed: a whole number of at least 1; try --ranks 1

    Raises:
        UsageError: a count is below 1 or no integer.
    """
    for option, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(
                f"{schedule}: got --{option} {count}; needed: a whole number of at least 1; try --{option} 1"
            )


def as_option(name: str) -> str:
    """Return an option as the command line spells it.

    >>> as_option("memory_limit")
    '--memory-limit'
    """
    return f"--{name.replace('_', '-')}"


def nearest(value: int, legal: Iterable[int]) -> str:
    """Name the legal values next to ``value`` on either side.

    >>> nearest(7, [2, 4, 6, 8, 10]), nearest(9, [1, 2, 4])
    ('6 or 8', '4')
    """
    ordered = sorted(legal)
    below = [n for n in ordered if n <= value][-1:]
    above = [n for n in ordered if n > value][:1]
    return " or ".join(map(str, below + above))


def require_even_ranks(schedule: str, ranks: int) -> None:
    """Refuse an odd number of ranks, on which two directions do not mirror each other.

    Raises:
        UsageError: with the even numbers next to it.
    """
    if ranks % 2:
        legal = nearest(ranks, (n for n in (ranks - 1, ranks + 1) if n >= 2))
        why = "one rank has no opposite direction" if ranks == 1 else "the two directions meet between two ranks"
        raise UsageError(f"{schedule}: got --ranks {ranks}; needed: an even number, as {why}; try --ranks {legal}")


def linear(ranks: int, chunks: int = 1) -> Placement:
    """Place stage ``s`` of ``ranks`` × ``chunks`` stages on rank ``s`` mod ``ranks``, on one route."""
    return Placement(ranks, (tuple(range(ranks)) * chunks,))


def wave_route(ranks: int, waves: int = 1) -> tuple[int, ...]:
    """Return the rank of each of 2·``waves``·``ranks`` stages that go down the ranks and up again, ``waves`` times.

    >>> wave_route(3), wave_route(2, waves=2)
    ((0, 1, 2, 2, 1, 0), (0, 1, 1, 0, 0, 1, 1, 0))
    """
    down = tuple(range(ranks))
    return (*down, *reversed(down)) * waves


def slot_programs(
    placement: Placement, microbatch_to_route: Sequence[int], starts: Sequence[int]
) -> tuple[tuple[Action, ...], ...]:
    """Order each rank's F and B by slot, where each micro-batch runs through all S stages and back without a pause.

    A micro-batch that starts in slot t runs F(s) in slot t + s and B(s) in slot t + 2S − 1 − s; two actions that share
    a slot of a rank run in order of their micro-batches.

    >>> for program in slot_programs(Placement(2, ((0, 1, 1, 0),)), [0, 0], starts=[0, 2]):
    ...     print(" ".join(map(str, program)))
    0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    timetable: list[list[tuple[int, Action]]] = [[] for _ in range(placement.num_ranks)]
    last = 2 * placement.num_stages - 1
    with collector_paused():
        for microbatch, (route, start) in enumerate(zip(microbatch_to_route, starts, strict=True)):
            for stage, rank in enumerate(placement.routes[route]):
                timetable[rank].append((start + stage, Action(Kind.F, stage, microbatch)))
                timetable[rank].append((start + last - stage, Action(Kind.B, stage, microbatch)))
        return tuple(tuple(action for _, action in sorted(slots, key=itemgetter(0))) for slots in timetable)


def actions(kind: Kind, stages: Iterable[int], microbatches: Iterable[int]) -> list[Action]:
    """Make one action per (stage, micro-batch) pair, in order; faster than calling ``Action`` half a million times.

    >>> [str(action) for action in actions(Kind.F, [0, 0, 4], [0, 1, 0])]
    ['0F0', '0F1', '4F0']
    """
    return list(map(Action._make, zip(repeat(kind), stages, microbatches, strict=False)))


def merge_1f1b(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """Run ``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left.

    >>> merged = merge_1f1b(actions(Kind.F, [1] * 3, range(3)), actions(Kind.B, [1] * 3, range(3)), warmup=1)
    >>> " ".join(map(str, merged))
    '1F0 1F1 1B0 1F2 1B1 1B2'
    """
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    turns = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *turns, *backwards[steady:]]
