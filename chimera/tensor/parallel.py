"""The ranks that share every layer between them, and the collectives they share it by.

``TensorParallel`` says who this rank is among the t ranks of its group (Shoeybi et al. 2019, arXiv 1909.08053) and
whether they also divide the sequence between tensor-parallel regions (Korthikanti et al. 2022, arXiv 2205.05198). Its
collectives are started and waited for apart, so that a caller can compute meanwhile. Knows neither pipelines nor
data-parallel replicas, and no layer.
"""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from chimera.errors import UsageError
from chimera.tensor.communicator import Communicator, Pending, default_backend, own_store
from chimera.tensor.dropout import Part

__all__ = ["ALONE", "Collective", "TensorParallel"]

_SEQUENCE = 1
"""The dimension of activations along which a sequence is divided."""


class Collective:
    """A collective under way; ``wait`` gives its result."""

    __slots__ = ("_dim", "_pending", "_result", "_to")

    def __init__(self, pending: Pending | None, result: Tensor, to: torch.device, *, dim: int | None = None) -> None:
        self._pending = pending
        self._result = result
        self._to = to
        self._dim = dim

    def wait(self) -> Tensor:
        """Wait for the end and return the result.

        Raises:
            StalledError: a peer died, or did not take part in time.
        """
        if self._pending is not None:
            self._pending.wait()
        result = self._result.to(self._to)
        if self._dim is None:
            return result
        # [t, …, part, …] to […, t · part, …]; a view where all dimensions before are 1.
        return result.movedim(0, self._dim).flatten(self._dim, self._dim + 1)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place among the t ranks that share each layer.

    Attributes:
        rank: this one's number, 0…t-1.
        size: t.
        sequence: whether activations between tensor-parallel regions are divided along the sequence (dim 1).
        communicator: of these ranks; None where there is only one, or where only shapes are asked for: tensors without
            storage exchange nothing.
    """

    rank: int = 0
    size: int = 1
    sequence: bool = False
    communicator: Communicator | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    @classmethod
    def join(
        cls,
        world: "dist.ProcessGroup | None",
        size: int,
        *,
        sequence: bool = False,
        device: torch.device | None = None,
        backend: str | None = None,
        timeout_s: float = 600.0,
    ) -> "TensorParallel":
        """Connect this rank with those that share its layers; all ranks of ``world`` call this with equal arguments.

        Args:
            world: all ranks of the run, tensor-parallel ones adjacent: ranks 0…t-1 share their layers, t…2t-1 do, and
                so on. None for a process on its own.
            size: t.
            sequence: whether activations between tensor-parallel regions are divided along the sequence.
            device: where the model lives; the CPU by default.
            backend: "gloo" or "nccl"; by default nccl where every rank has a CUDA device of its own.
            timeout_s: how long an operation waits for its peers.

        Raises:
            UsageError: t does not divide the number of ranks.
        """
        total, rank = (world.size(), world.rank()) if world is not None else (1, 0)
        if size < 1 or total % size:
            legal = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise UsageError(
                f"t = {size} tensor-parallel ranks do not divide the {total} ranks of the run; take a t among {legal}"
            )
        first = rank // size * size
        place = cls(rank - first, size, sequence)
        store = own_store(world)
        if size == 1 or store is None:
            return place
        backend = backend or default_backend(store, rank, total, device or torch.device("cpu"))
        members = range(first, first + size)
        store = PrefixStore(f"tensor{first}", store)
        return replace(place, communicator=Communicator(backend, store, members, rank, timedelta(seconds=timeout_s)))

    @property
    def divides_sequence(self) -> bool:
        """Whether there is a sequence to divide and somebody to divide it with."""
        return self.sequence and self.size > 1

    @property
    def undivided(self) -> "TensorParallel":
        """The same ranks, where all of them have the whole sequence."""
        return replace(self, sequence=False)

    @property
    def sequence_part(self) -> Part | None:
        """Which part of activations between tensor-parallel regions is here; None for all of them."""
        return self.part_along(_SEQUENCE) if self.divides_sequence else None

    def part_along(self, dim: int) -> Part | None:
        """Return which part of a tensor that is cut along ``dim`` is here; None for all of it."""
        return Part(dim, self.rank, self.size) if self.size > 1 else None

    def share(self, total: int, what: str) -> int:
        """Return one rank's part of ``total``.

        Raises:
            UsageError: t does not divide it; ``what`` names it in the message.
        """
        if total % self.size:
            legal = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise UsageError(
                f"{what} = {total} does not divide over t = {self.size} tensor-parallel ranks; "
                f"take a t among {legal}, or change {what}"
            )
        return total // self.size

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of ``whole`` along ``dim``, a view.

        Raises:
            UsageError: t does not divide the dimension.
        """
        length = self.share(whole.shape[dim], "the sequence length" if dim == _SEQUENCE else f"dimension {dim}")
        return whole.narrow(dim, self.rank * length, length)

    def start_sum(self, values: Tensor, *, into: bool = False) -> Collective:
        """Start summing over the ranks; ``into`` says that the result may stand where ``values`` did."""
        wire = self._wire(values, copy=not into)
        # Backends differ in what they make of nothing, which all ranks have alike.
        pending = self._group.all_reduce(wire) if wire.numel() and not wire.is_meta else None
        return Collective(pending, wire, values.device)

    def start_maximum(self, values: Tensor) -> Collective:
        """Start taking the largest value over the ranks; the result is a tensor of its own."""
        wire = self._wire(values, copy=True)
        pending = self._group.maximum(wire) if wire.numel() and not wire.is_meta else None
        return Collective(pending, wire, values.device)

    def start_gather(self, part: Tensor, dim: int) -> Collective:
        """Start joining the ranks' parts along ``dim``."""
        wire = self._wire(part)
        result = wire.new_empty((self.size, *wire.shape))
        pending = None if wire.is_meta else self._group.all_gather(result, wire)
        return Collective(pending, result, part.device, dim=dim)

    def start_scatter(self, values: Tensor, dim: int) -> Collective:
        """Start summing over the ranks, of which each gets its own part along ``dim`` (a reduce-scatter).

        Raises:
            UsageError: t does not divide the dimension.
        """
        length = self.share(values.shape[dim], "the sequence length" if dim == _SEQUENCE else f"dimension {dim}")
        wire = self._wire(torch.unflatten(values, dim, (self.size, length)).movedim(dim, 0))
        result = torch.empty_like(wire[0])
        pending = None if wire.is_meta else self._group.reduce_scatter(result, wire)
        return Collective(pending, result, values.device)

    @property
    def _group(self) -> Communicator:
        assert self.communicator is not None, "ranks that are asked for shapes alone have no collectives"
        return self.communicator

    def _wire(self, values: Tensor, *, copy: bool = False) -> Tensor:
        """Return ``values`` as they travel: contiguous, and for gloo on the CPU."""
        values = values.detach()
        if values.is_cuda and self._group.backend == "gloo":
            return values.cpu().contiguous()
        return values.clone(memory_format=torch.contiguous_format) if copy else values.contiguous()


ALONE = TensorParallel()
"""A rank that has its layers to itself."""
