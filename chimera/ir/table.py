"""A schedule's programs in columns: one row per action, ranks one after another.

It holds the same facts as the tuples of actions, in the form that numpy and compiled loops want. It derives nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from chimera.ir.action import Action, Instruction, Overlap, flatten

__all__ = ["NO_MICROBATCH", "Table"]

NO_MICROBATCH = -1
"""What the microbatch column holds for actions of a whole stage: a column of integers has no None."""


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
        has_pairs = any(type(i) is Overlap for program in programs for i in program)
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
        return cls(
            kind=np.array([a[0] for a in flat], np.uint8),
            stage=np.array([a[1] for a in flat], np.int32),
            microbatch=np.array([NO_MICROBATCH if a[2] is None else a[2] for a in flat], np.int32),
            paired=paired,
            position=position,
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        )

    @property
    def rank(self) -> NDArray[np.int32]:
        """The rank of each row."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), np.diff(self.offsets))

    def __len__(self) -> int:
        return len(self.kind)
