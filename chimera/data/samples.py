"""What every kind of sample has in common, and sets of them blended by weight.

A sample is a pure function of its index, which starts at 0 and has no end: indices beyond ``len`` are later epochs. So
which samples a step holds depends on nothing but its number.
"""

from collections.abc import Collection, Sequence
from fractions import Fraction
from math import lcm
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from chimera.errors import ConfigError

__all__ = ["BlendedSamples", "Sample", "Samples", "blend_period"]

Sample = dict[str, NDArray[np.int64]]

_LONGEST_PERIOD: Final = 100_000


class Samples(Protocol):
    """Samples by index."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of a sample's arrays."""

    def __len__(self) -> int:
        """Samples of one epoch."""

    def __getitem__(self, index: int) -> Sample:
        """Make the sample of an index, 0 or more and without an upper end."""

    def sample(self, index: int, fields: Collection[str]) -> Sample:
        """Make the sample with at least these fields; those that cost something and are not asked for are left out."""


class BlendedSamples:
    """Several sets of samples in exact proportion.

    The order has a period, in which each set comes exactly as often as its weight says; and after any number n of
    samples, each set has come within one of n times its share (Tijdeman 1980, "The chairman assignment problem"). A set
    that is shorter than its share starts its next epoch.

    Args:
        sets: with equal fields.
        weights: one each, above 0; only their ratios matter.

    Raises:
        ConfigError: another number of weights, a weight that is not above 0, or ratios without a short period.
    """

    __slots__ = ("_counts", "_order", "_rank", "_sets")

    def __init__(self, sets: Sequence[Samples], weights: Sequence[float]) -> None:
        if len(sets) != len(weights):
            raise ConfigError(f"data.weights has {len(weights)} numbers for {len(sets)} datasets; give one for each")
        assert len({samples.fields for samples in sets}) == 1, "the sets are of one kind"
        self._sets = tuple(sets)
        self._counts = _whole_numbers(weights)
        self._order = blend_period(self._counts)
        self._rank = np.empty(len(self._order), np.int64)
        for number in range(len(sets)):
            places = self._order == number
            self._rank[places] = np.arange(self._counts[number])

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of a sample's arrays."""
        return self._sets[0].fields

    def __len__(self) -> int:
        """Samples until every set has been met once in whole."""
        period = len(self._order)
        return max(-(-len(samples) * period // count) for samples, count in zip(self._sets, self._counts, strict=True))

    def source_of(self, index: int) -> tuple[int, int]:
        """Return which set a sample comes from, and its index there."""
        period, place = divmod(index, len(self._order))
        number = int(self._order[place])
        return number, period * self._counts[number] + int(self._rank[place])

    def __getitem__(self, index: int) -> Sample:
        """Make the sample of an index, 0 or more and without an upper end."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are counted from 0 and have no end to count back from")
        return self.sample(index, self.fields)

    def sample(self, index: int, fields: Collection[str]) -> Sample:
        """Make the sample with at least these fields."""
        number, within = self.source_of(index)
        return self._sets[number].sample(within, fields)


def blend_period(counts: Sequence[int]) -> NDArray[np.uint16]:
    """Return one period of the blend: which set each place is from, set i ``counts[i]`` times.

    Every place goes to the set whose turn ends first, among those whose share is due: Tijdeman's rule.

    >>> blend_period([3, 1]).tolist()
    [0, 0, 1, 0]
    """
    period, num_sets = sum(counts), len(counts)
    order = np.zeros(period, np.uint16)
    if num_sets == 1:
        return order
    # In whole numbers, to be exact on every machine: all quantities are multiples of 1 / (period · scale).
    scale = 2 * num_sets - 2
    given = [0] * num_sets
    for place in range(period):
        best, best_slack = -1, 0
        for number, count in enumerate(counts):
            due = scale * (count * (place + 1) - given[number] * period)
            if due < period:
                continue
            slack = (scale - 1) * period - due
            if best < 0 or slack * counts[best] < best_slack * count:
                best, best_slack = number, slack
        order[place] = best
        given[best] += 1
    assert given == list(counts), "a period has every set as often as it should"
    return order


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the ratios of the weights, taken as the decimals they are written as."""
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise ConfigError(f"data.weights has {weight}; each must be a number above 0")
    exact = [Fraction(repr(weight)) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * common) for fraction in exact]
    shared = int(np.gcd.reduce(np.array(whole, dtype=object)))
    whole = [number // shared for number in whole]
    if sum(whole) > _LONGEST_PERIOD:
        raise ConfigError(
            f"data.weights {', '.join(map(str, weights))} stand in the ratio {':'.join(map(str, whole))}, whose order "
            f"only repeats after {sum(whole):,} samples; round them, to 0.01 say, so that it does after "
            f"{_LONGEST_PERIOD:,} at most"
        )
    return whole
