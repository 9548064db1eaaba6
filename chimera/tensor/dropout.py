"""Dropout whose mask is a function of a key and of where an element stands in the whole tensor.

So a rank that holds a part of a tensor draws exactly its part of the mask, a recomputed forward draws the same mask
again from the same key, and CPU and GPU agree. The key itself comes from torch's default generator, one number per
call, which whoever runs the layer has seeded. Knows no ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Part", "draw_key", "dropout", "keep_mask"]

_WORD = 2**32
_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴ divided by the golden ratio, as a signed number
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # the multipliers of SplitMix64, signed likewise
_ELEMENT = (0x2C1B3C6D, 0x297A2D39)
"""Odd multipliers of the 32-bit hash of an element (found by Chris Wellons' search for low bias, "triple32")."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a larger tensor one is: number ``index``, from 0, of ``count`` equal ones along ``dim``."""

    dim: int
    index: int
    count: int


@torch.compiler.disable  # type: ignore[untyped-decorator]
def draw_key(device: torch.device) -> Tensor:
    """Return a new key, a number from the default generator of ``device``."""
    return torch.randint(2**62, (), device=device)


def dropout(values: Tensor, p: float, *, training: bool, part: Part | None = None, key: Tensor | None = None) -> Tensor:
    """Set elements to 0 with probability ``p`` and scale the others by 1 / (1 − p); without ``training`` do nothing.

    Args:
        values: of two or more dimensions.
        p: a probability below 1.
        training: whether to do so at all.
        part: where ``values`` stand in a larger tensor; None for all of it.
        key: what the mask depends on; None draws one.
    """
    if not training or p == 0.0:
        return values
    keep = keep_mask(values.shape, p, draw_key(values.device) if key is None else key, part)
    # values · keep / (1 − p), as any dropout does in its backward: one kernel, and the graph keeps the mask alone.
    dropped: Tensor = torch.ops.aten.native_dropout_backward(values, keep, 1.0 / (1.0 - p))
    return dropped


# A compiler folds the hash's constants into numbers beyond 64 bits, and draws from generators of its own.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def keep_mask(shape: torch.Size, p: float, key: Tensor, part: Part | None = None) -> Tensor:
    """Return which elements of a tensor of ``shape`` stay: each with probability 1 − ``p``, rounded to 2⁻³².

    Rows (the last dimension) and columns have a 32-bit hash each, of the key and their place in the whole tensor; an
    element hashes their sum.
    """
    rows, columns = _places(shape, part, key.device)
    bits = _hash(rows, key, 0).unsqueeze(-1) + _hash(columns, key, 1)
    for shift, multiplier in zip((15, 12), _ELEMENT, strict=True):
        bits ^= bits >> shift
        bits *= multiplier
    return bits >= round(p * _WORD) - _WORD // 2


def _places(shape: torch.Size, part: Part | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows, in the shape of all dimensions but the last, and those of the columns."""
    last = len(shape) - 1
    whole = [size * (part.count if part is not None and dim == part.dim else 1) for dim, size in enumerate(shape)]
    along = [torch.arange(size, device=device) for size in shape]
    if part is not None:
        along[part.dim] += part.index * shape[part.dim]
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for dim in range(last):
        rows = rows.unsqueeze(-1) + along[dim] * math.prod(whole[dim + 1 : last])
    return rows, along[last]


def _hash(places: Tensor, key: Tensor, stream: int) -> Tensor:
    """Hash 64-bit numbers to 32 bits with the finalizer of SplitMix64 (Steele et al., OOPSLA'14)."""
    state = (places * 2 + stream) * _GOLDEN + key
    state = (state ^ (state >> 30)) * _FIRST
    state = (state ^ (state >> 27)) * _SECOND
    state = state ^ (state >> 31)
    return state.to(torch.int32)
