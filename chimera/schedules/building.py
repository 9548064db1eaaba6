"""What the schedule functions share: checked counts, actions in bulk, and the one-forward-one-backward merge.

It knows no schedule. Options are named as the command line names them, so that an error says what to change.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

from chimera.errors import UsageError
from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Placement

__all__ = ["actions", "linear", "merge_1f1b", "nearest", "require_counts"]


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


def nearest(value: int, legal: Iterable[int]) -> str:
    """Name the legal values next to ``value`` on either side.

    >>> nearest(7, [2, 4, 6, 8, 10]), nearest(9, [1, 2, 4])
    ('6 or 8', '4')
    """
    ordered = sorted(legal)
    below = [n for n in ordered if n <= value][-1:]
    above = [n for n in ordered if n > value][:1]
    return " or ".join(map(str, below + above))


def linear(ranks: int, chunks: int = 1) -> Placement:
    """Place stage ``s`` of ``ranks`` × ``chunks`` stages on rank ``s`` mod ``ranks``, on one route."""
    return Placement(ranks, (tuple(range(ranks)) * chunks,))


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
