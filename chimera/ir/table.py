"""A schedule's programs in columns: one row per action, ranks one after another.

It holds the same facts as the tuples of actions, in the form that numpy and compiled loops want. It derives nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Action, Instruction, Kind, Overlap, flatten
from chimera.ir.collector import collector_paused

__all__ = ["NO_MICROBATCH", "Table"]

NO_MICROBATCH = -1
"""What the microbatch column holds for actions of a whole stage: a column of integers has no None."""

_KINDS = tuple(Kind)
_make_action = partial(tuple.__new__, Action)
"""``Action._make`` without its Python frame: a lowered schedule has millions of actions."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Columns over all actions; rank ``r`` owns rows ``offsets[r]:offsets[r + 1]``, in program order.

    A pair takes two rows, forward then backward; ``paired`` is true on both. ``position`` is the place of the row's
    instruction in its rank's program.
    """

    kind: NDArray[np.uint8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    paired: NDArray[np.bool_]
    position: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def from_programs(cls, programs: Sequence[Sequence[Instruction]]) -> "Table":
        """Lay out ``programs[rank]`` in columns."""
        has_pairs = any(Overlap in set(map(type, program)) for program in programs)
        flat: list[Action]
        if has_pairs:
            rows = [list(flatten(program)) for program in programs]
            flat = list(chain.from_iterable(rows))
            lengths = [len(row) for row in rows]
            widths = [[2 if type(i) is Overlap else 1 for i in program] for program in programs]
            paired = np.concatenate([np.repeat(np.asarray(w, np.int8) == 2, w) for w in widths])
            position = np.concatenate([np.repeat(np.arange(len(w), dtype=np.int32), w) for w in widths])
        else:
            flat = list(chain.from_iterable(programs))  # type: ignore[arg-type]  # no pair among them
            lengths = [len(program) for program in programs]
            paired = np.zeros(len(flat), np.bool_)
            position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        size = len(flat)
        microbatches = map(itemgetter(2), flat)
        return cls(
            kind=np.fromiter(map(itemgetter(0), flat), np.uint8, size),
            stage=np.fromiter(map(itemgetter(1), flat), np.int32, size),
            microbatch=np.fromiter((NO_MICROBATCH if m is None else m for m in microbatches), np.int32, size),
            paired=paired,
            position=position,
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        )

    def to_programs(self) -> tuple[tuple[Instruction, ...], ...]:
        """Build the tuples of instructions again; the inverse of ``from_programs``."""
        with collector_paused():
            microbatches: list[int | None] = self.microbatch.tolist()
            for row in np.flatnonzero(self.microbatch == NO_MICROBATCH).tolist():
                microbatches[row] = None
            kinds = map(_KINDS.__getitem__, self.kind.tobytes())
            actions: list[Action] = list(map(_make_action, zip(kinds, self.stage.tolist(), microbatches, strict=True)))
            bounds = self.offsets.tolist()
            if not self.paired.any():
                return tuple(tuple(actions[a:b]) for a, b in pairwise(bounds))
            paired = self.paired.tolist()
            return tuple(tuple(_joined(actions[a:b], paired[a:b])) for a, b in pairwise(bounds))

    @property
    def rank(self) -> NDArray[np.int32]:
        """The rank of each row."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), np.diff(self.offsets))

    def action_at(self, row: int) -> Action:
        """Return the action in ``row``; of a pair the half that stands there."""
        microbatch = int(self.microbatch[row])
        return Action(
            Kind(int(self.kind[row])), int(self.stage[row]), None if microbatch == NO_MICROBATCH else microbatch
        )

    def instruction_at(self, row: int) -> Instruction:
        """Return the instruction whose first row is ``row``."""
        action = self.action_at(row)
        return Overlap(action, self.action_at(row + 1)) if self.paired[row] else action

    def __len__(self) -> int:
        return len(self.kind)


def _joined(actions: list[Action], paired: list[bool]) -> Iterator[Instruction]:
    """Yield one rank's instructions, putting the two rows of each pair together."""
    rows = iter(zip(actions, paired, strict=True))
    for action, in_pair in rows:
        yield Overlap(action, next(rows)[0]) if in_pair else action
