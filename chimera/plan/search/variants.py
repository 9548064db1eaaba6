"""The schedules that a search tries on p ranks: every registered synchronous one, with each of its own sizes.

It reads the registry and knows no schedule's order. What is left out, because it is another variant under a second
name or no schedule of one step, is said here and in ``docs/planning.md``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from chimera.ir.schedule import Schedule
from chimera.plan.divisors import divisors
from chimera.schedules import SCHEDULES, build_schedule

__all__ = ["MAX_CHUNKS", "MAX_PAIRS", "MAX_SEARCHED_RANKS", "MAX_WAVES", "SINGLE_RANK", "Variant", "variants"]

MAX_CHUNKS: Final = 12
"""Chunks of a rank that are tried: more messages, and stages of few blocks, win nothing beyond."""

MAX_WAVES: Final = 4
"""Waves that are tried, two stages of a rank each."""

MAX_PAIRS: Final = 4
"""Pairs of pipelines that are tried, with two copies of the weights each."""

MAX_SEARCHED_RANKS: Final = 32
"""Ranks for which an order is searched: the list scheduler takes seconds for more."""

SINGLE_RANK: Final = "1f1b"
"""The one schedule of a pipeline of one rank: all others run the same computations there."""

_UNITS: Final = ("concatenate", "double")
"""Backward halving is doubling on micro-batches of half the size, which the search tries as micro-batches of that
size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A schedule with its own sizes; those that it does not take are None."""

    schedule: str
    chunks: int | None = None
    pairs: int | None = None
    waves: int | None = None
    unit: str | None = None

    def build(self, ranks: int, microbatches: int) -> Schedule:
        """Build it.

        Raises:
            UsageError: it cannot take these sizes.
        """
        return build_schedule(
            self.schedule,
            ranks=ranks,
            microbatches=microbatches,
            chunks=self.chunks,
            pairs=self.pairs,
            waves=self.waves,
            unit=self.unit,
        )

    @property
    def title(self) -> str:
        """Name and sizes in print.

        >>> Variant(schedule="interleaved", chunks=3).title, Variant(schedule="chimera", pairs=1, unit="double").title
        ('interleaved v=3', 'chimera f=1 double')
        """
        sizes = (("v", self.chunks), ("f", self.pairs), ("w", self.waves))
        words = [self.schedule, *(f"{letter}={size}" for letter, size in sizes if size is not None)]
        return " ".join(words if self.unit in {None, "concatenate"} else [*words, str(self.unit)])


def variants(ranks: int, blocks: int, *, names: tuple[str, ...]) -> Iterator[Variant]:
    """Yield the variants of ``names`` on ``ranks`` ranks whose stages can have a block each.

    One chunk per rank is left out where it is a schedule of its own (1f1b, gpipe, zb-h1), and any pipeline of one
    rank beside ``SINGLE_RANK``.

    >>> [v.title for v in variants(4, 12, names=("1f1b", "interleaved", "chimera"))]
    ['1f1b', 'interleaved v=2', 'interleaved v=3', 'chimera f=1', 'chimera f=1 double', 'chimera f=2', \
'chimera f=2 double']
    """
    if ranks == 1:
        yield from (Variant(schedule=name) for name in names if name == SINGLE_RANK)
        return
    for name in names:
        sizes: list[dict[str, Any]] = [{}]
        for option, values in _values(name, ranks, blocks):
            sizes = [{**given, option: value} for given in sizes for value in values]
        yield from (Variant(schedule=name, **given) for given in sizes)


def _values(name: str, ranks: int, blocks: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for option in SCHEDULES[name].options:
        if option == "chunks":
            yield option, tuple(range(2, min(MAX_CHUNKS, blocks // ranks) + 1))
        elif option == "waves":
            yield option, tuple(range(1, min(MAX_WAVES, blocks // (2 * ranks)) + 1))
        elif option == "pairs":
            yield option, tuple(f for f in divisors(ranks // 2) if f <= MAX_PAIRS) if ranks % 2 == 0 else (1,)
        elif option == "unit":
            yield option, _UNITS
