"""What tensor-parallel ranks that all have a message send of it: an equal share each, which the receiving ranks join.

Between tensor-parallel regions t ranks have the same activations and gradients. The next stage is usually reached over
slower links than one another, so each rank sends 1/t, and the receivers gather the rest from one another (Narayanan et
al. 2021, arXiv 2104.04473, section 4.1). Where the sequence is divided, the ranks have a part each and send that.
Knows neither schedules nor channels, and never touches a bit of a tensor.
"""

import math
from typing import Final

import torch
from torch.nn import functional

from chimera.errors import RunError
from chimera.runtime.channels import Spec, Tensors, TensorSpec
from chimera.tensor.parallel import Collective, TensorParallel

__all__ = ["Shares"]

_SAMPLES: Final = 1024
_ALIKE: Final = 1e-2
"""Ranks that compute the same thing differ by less, if at all; others by about 1."""


class Shares:
    """Divides messages among the ranks that have them, and joins what these send.

    Args:
        tensor: the ranks that share their layers.
        one_byte: whether a single byte stands in for every message: then so it does for what is joined, to zeros.
    """

    def __init__(self, tensor: TensorParallel, *, one_byte: bool = False) -> None:
        self._tensor = tensor
        self._one_byte = one_byte
        self._count = 1 if tensor.divides_sequence else tensor.size
        self._compared: set[str] = set()

    def spec(self, whole: Spec) -> Spec:
        """Return what travels of a message: a flat share of each tensor, padded where t does not divide it."""
        if self._count == 1:
            return whole
        return tuple(TensorSpec((self._length(shape),), dtype) for shape, dtype in whole)

    def divide(self, whole: Tensors, what: str) -> Tensors:
        """Return this rank's share of every tensor; all t ranks call this, in one order.

        Args:
            whole: a message, the same on all t ranks.
            what: its name, for the error; the ranks compare the first message of each name.

        Raises:
            RunError: the ranks have different ones, so that their shares would make none of them.
        """
        if self._count == 1:
            return whole
        if what not in self._compared:
            self._compare(whole, what)
            self._compared.add(what)
        return tuple(map(self._share, whole))

    def join(self, shares: Tensors, whole: Spec) -> Tensors:
        """Return the tensors that ``divide`` was given; all t ranks call this, in one order."""
        if self._count == 1:
            return shares
        gathers = [self._start_gather(share) for share in shares]
        return tuple(
            self._joined(gather, share, spec.shape) for gather, share, spec in zip(gathers, shares, whole, strict=True)
        )

    def _length(self, shape: tuple[int, ...]) -> int:
        return -(-math.prod(shape) // self._count)

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        flat, length = tensor.reshape(-1), self._length(tuple(tensor.shape))
        mine = flat[self._tensor.rank * length : (self._tensor.rank + 1) * length]
        # A copy in any case: a view would keep the whole tensor until its share is gone.
        return functional.pad(mine, (0, length - len(mine))) if len(mine) < length else mine.clone()

    def _start_gather(self, share: torch.Tensor) -> Collective | None:
        # As bytes, since backends do not gather every type; and not all of them gather nothing.
        sent = share.new_zeros(1, dtype=torch.uint8) if self._one_byte else share.view(torch.uint8)
        return self._tensor.start_gather(sent, 0) if len(share) else None

    def _joined(self, gather: Collective | None, share: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if gather is None:
            return share.view(shape)
        gathered = gather.wait()
        if self._one_byte:
            return share.new_zeros(shape)
        return gathered.view(share.dtype)[: math.prod(shape)].view(shape)

    def _compare(self, whole: Tensors, what: str) -> None:
        for number, tensor in enumerate(whole):
            everyones = self._tensor.start_gather(_sample(tensor)[None], 0).wait()
            sizes, values = everyones[:, 0], everyones[:, 1:]
            differences = torch.linalg.vector_norm(values - values[0], dim=1)
            # What is not a number compares as alike: others find it, and say where.
            differ = (sizes != sizes[0]) | (differences > _ALIKE * torch.linalg.vector_norm(values[0]))
            if bool(differ.any()):
                raise RunError(
                    f"tensor {number} of the message {what}, {list(tensor.shape)} here, differs between the "
                    f"{self._count} ranks that share their layers, but each sends 1/{self._count} of what all of them "
                    "have; hand the same tensors over on every rank, or cut the stages elsewhere (layer_to_stage=)"
                )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the size of a tensor and elements from all over it, ``[1 + _SAMPLES]`` in fp64."""
    flat = tensor.reshape(-1)
    some = flat[:: max(1, -(-len(flat) // _SAMPLES))].double()
    return functional.pad(torch.cat([some.new_tensor([len(flat)]), some]), (0, _SAMPLES - len(some)))
