"""Measured times of one block by micro-batch size, from CSV files of per-block profiles, in place of modelled ones.

Columns ``gpu, model, seq, micro_batch, forward_ms, backward_ms``; others are left alone. Sizes between measured ones
are interpolated, none beyond them is guessed. A profile is of one device without tensor parallelism and recomputation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from chimera.errors import FormatError, UsageError, nearest_names
from chimera.plan.closed import ModelTimes
from chimera.plan.csv_rows import Row, read_rows
from chimera.plan.dims import Number
from chimera.plan.layers import LayerTimes
from chimera.plan.layout import Recompute

__all__ = ["BlockTimes", "read_block_times"]

_COLUMNS: Final = ("gpu", "model", "seq", "micro_batch", "forward_ms", "backward_ms")


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Times of one block.

    Attributes:
        name: of the profile, as device and model.
        seq: tokens of its sequences.
        sizes: b that were measured, ascending.
        forward_s: of each size.
        backward_s: of each size, the whole backward.
    """

    name: str
    seq: int
    sizes: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    option: ClassVar[str] = "--block-times"

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks t."""
        return 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether these ranks shared what lies between their products."""
        return False

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """What a backward may run again: nothing, or the forward that was measured."""
        return ("none", "full")

    def in_place_of(self, modelled: ModelTimes, *, microbatch: Number, recomputes: Number) -> ModelTimes:
        """Return measured times of the block beside modelled ones of the ends; see ``block``."""
        block = self.block(modelled.blocks[0], microbatch=microbatch, recomputes=recomputes)
        return modelled._replace(blocks=(block,))

    def block(self, modelled: LayerTimes, *, microbatch: Number, recomputes: Number) -> LayerTimes:
        """Return measured times; the modelled ones say how a backward divides into I and W.

        Args:
            modelled: times of the block, recomputation included.
            microbatch: b, within the measured sizes.
            recomputes: 1 where the backward runs the block again, else 0.
        """
        forward = np.interp(microbatch, self.sizes, self.forward_s)
        backward = np.interp(microbatch, self.sizes, self.backward_s)
        again = recomputes * modelled.forward_s
        weights = backward * modelled.weight_grad_s / (modelled.backward_s - again)
        return LayerTimes(forward, backward - weights + recomputes * forward, weights, modelled.collective_s * 0.0)


def read_block_times(path: str | Path, profile: str | None = None) -> BlockTimes:
    """Read one profile of a CSV file.

    Args:
        path: of the file.
        profile: "gpu/model" where the file holds several.

    Raises:
        FormatError: there is no such file, it has other columns, or a number in it is none.
        UsageError: there is no such profile, or several and none is named.
    """
    rows = read_rows(path, _COLUMNS, "table of measured blocks")
    names = sorted({_profile_of(row) for row in rows})
    if profile is None and len(names) > 1:
        raise UsageError(
            f"--block-times {path} holds several profiles; name one with --block-profile: {', '.join(names)}"
        )
    if profile is not None and profile not in names:
        near = nearest_names(profile, names)
        raise UsageError(f"--block-profile {profile}: {path} has none of this name{near}; it has: {', '.join(names)}")
    chosen = profile or names[0]
    values = sorted(_numbers(row) for row in rows if _profile_of(row) == chosen)
    if len({seq for _, seq, _, _ in values}) > 1 or len({size for size, _, _, _ in values}) < len(values):
        raise FormatError(
            f"{path}: {chosen} has several lengths, or a micro-batch size twice; needed: one row per size"
        )
    return BlockTimes(
        name=chosen,
        seq=values[0][1],
        sizes=tuple(size for size, _, _, _ in values),
        forward_s=tuple(forward for _, _, forward, _ in values),
        backward_s=tuple(backward for _, _, _, backward in values),
    )


def _profile_of(row: Row) -> str:
    return f"{row.fields['gpu']}/{row.fields['model']}"


def _numbers(row: Row) -> tuple[int, int, float, float]:
    """Return b, s and the seconds of forward and backward."""
    forward, backward = (row.number(column) / 1e3 for column in ("forward_ms", "backward_ms"))
    return row.count("micro_batch"), row.count("seq"), forward, backward
