"""Which tokens of a sequence are hidden, and by what.

Knows BERT's rule (Devlin et al. 2019, section 3.1): of the chosen tokens 80 % become [MASK], 10 % a random word piece,
10 % stay. Chosen are single tokens, whole words (google-research/bert, "whole word masking"), or stretches of up to n
words, short ones more often (Joshi et al. 2020; Lan et al. 2019: P(n) ∝ 1/n). Refuses to know where the sequence comes
from.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from chimera.data.keyed import below
from chimera.data.tokenizer import Vocabulary
from chimera.errors import ConfigError

__all__ = ["IGNORED_LABEL", "Masking", "Words"]

IGNORED_LABEL: Final = -100
_MASKED_SHARE, _FIRST_RANDOM_SHARE = 0.8, 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Words in place of tokens.

    Attributes:
        continuations: for each id, whether it goes on with the word of the token before it; None where every token
            counts as a word.
        longest: words n of the longest stretch that is hidden as one.

    Raises:
        ConfigError: ``longest`` is below 1.
    """

    continuations: NDArray[np.bool_] | None
    longest: int = 1

    def __post_init__(self) -> None:
        """Refuse stretches of no word."""
        if self.longest < 1:
            raise ConfigError(f"data.longest_ngram is {self.longest}; it must be 1 or more, 3 is usual")


class Masking:
    """Hides tokens.

    Args:
        vocabulary: whose special tokens are never chosen, replaced or drawn.
        share: of the ordinary tokens that are chosen.
        words: None chooses single tokens.

    Attributes:
        maskable: for each id, whether it may be chosen.
    """

    __slots__ = ("_mask", "_ordinary", "_share", "_words", "maskable")

    def __init__(self, vocabulary: Vocabulary, *, share: float, words: Words | None = None) -> None:
        self.maskable = np.ones(vocabulary.size, dtype=bool)
        self.maskable[list(vocabulary.special)] = False
        self._ordinary = np.flatnonzero(self.maskable)
        self._mask = vocabulary.mask
        self._share = share
        self._words = words

    def apply(self, ids: NDArray[np.int64], stream: np.random.Philox) -> NDArray[np.int64]:
        """Choose tokens, replace them in place, and return what they were: ``IGNORED_LABEL`` where not chosen."""
        labels = np.full(len(ids), IGNORED_LABEL, dtype=np.int64)
        maskable = np.flatnonzero(self.maskable[ids])
        if not len(maskable):
            return labels  # unknown words only: nothing to predict
        budget = max(1, round(self._share * len(maskable)))
        if self._words is None:
            lots = stream.random_raw(len(maskable) + 2 * budget)
            # Sorted, since argpartition leaves the order of the chosen to the numpy release.
            chosen = np.sort(maskable[np.argpartition(lots[: len(maskable)], budget - 1)[:budget]])
            lots = lots[len(maskable) :]
        else:
            chosen = self._stretches(ids, maskable, budget, self._words, stream)
            lots = stream.random_raw(2 * len(chosen))
        fate, words = _shares(lots).reshape(2, len(chosen))
        labels[chosen] = ids[chosen]
        ids[chosen[fate < _MASKED_SHARE]] = self._mask
        replaced = (fate >= _MASKED_SHARE) & (fate < _FIRST_RANDOM_SHARE)
        ids[chosen[replaced]] = self._ordinary[(words[replaced] * len(self._ordinary)).astype(np.int64)]
        return labels

    def _stretches(
        self,
        ids: NDArray[np.int64],
        maskable: NDArray[np.int64],
        budget: int,
        words: Words,
        stream: np.random.Philox,
    ) -> NDArray[np.int64]:
        """Whole words in stretches, met in random order until ``budget`` tokens are chosen or nothing more fits.

        A word longer than what is left of the budget is passed over, so that no word is chosen in part; where even the
        shortest word is longer than the whole budget, that one is chosen, since a sample has something to predict.
        """
        continues = np.zeros(len(maskable), dtype=bool)
        touching = maskable[1:] == maskable[:-1] + 1
        if words.continuations is not None:
            continues[1:] = touching & words.continuations[ids[maskable[1:]]]
        firsts = np.flatnonzero(~continues)
        bounds = [*firsts.tolist(), len(maskable)]
        # Stretches end at special tokens: words that do not touch are no neighbours.
        neighbours = [bool(first and touching[first - 1]) for first in firsts.tolist()]
        free = [True] * len(firsts)
        chosen: list[int] = []
        for word in np.argsort(stream.random_raw(len(firsts)), kind="stable").tolist():
            if len(chosen) >= budget:
                break
            end = word
            length = _harmonic(words.longest, stream)
            while (
                end < len(firsts)
                and end - word < length
                and free[end]
                and (end == word or neighbours[end])
                and len(chosen) + bounds[end + 1] - bounds[word] <= budget
            ):
                free[end] = False
                end += 1
            chosen += range(bounds[word], bounds[end])
        if not chosen:
            shortest = int(np.argmin(np.diff(bounds)))
            chosen = list(range(bounds[shortest], bounds[shortest + 1]))
        return np.sort(maskable[chosen])


def _harmonic(longest: int, stream: np.random.Philox) -> int:
    """Draw n of 1 to ``longest`` with probability in proportion to 1/n."""
    if longest == 1:
        return 1
    shares = np.cumsum(1.0 / np.arange(1, longest + 1))
    lot = below(stream, 1 << 53) * 2.0**-53 * shares[-1]
    return 1 + int(np.searchsorted(shares[:-1], lot, side="right"))


def _shares(lots: NDArray[Any]) -> NDArray[np.float64]:
    """Words of 64 bits as numbers of [0, 1)."""
    return (lots >> np.uint64(11)).astype(np.float64) * 2.0**-53
