"""The gradients of parameters that are reduced together: one flat buffer, summed bucket by bucket over its replicas.

Buckets are started one after another. With sharding, replica i of n gets the sum of the i-th part of each bucket only.
Who the replicas are, when a bucket's turn comes and which action starts what, others say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from chimera.errors import UsageError
from chimera.plan.buffers import buffer_layout
from chimera.runtime.ablation import GradientCommunicator
from chimera.tensor.communicator import Pending
from chimera.tensor.gradient_buffer import GradientBuffer, gradient_dtype

__all__ = ["Gradients", "Replicas", "Transfer"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold a copy of the same parameters.

    Attributes:
        communicator: of them all.
        rank: this one.
        on_cpu: whether collectives need CPU tensors although parameters are elsewhere.
    """

    communicator: GradientCommunicator
    rank: int
    on_cpu: bool

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.communicator.ranks)

    @property
    def index(self) -> int:
        """This rank's place among them."""
        return self.communicator.ranks.index(self.rank)

    def wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` as a collective takes it."""
        return tensor.cpu() if self.on_cpu else tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective under way, what it writes, and where that belongs."""

    pending: Pending
    wire: torch.Tensor
    target: torch.Tensor

    def finish(self) -> None:
        """Wait for it, and put what came where it belongs."""
        self.pending.wait()
        if self.wire.device != self.target.device:
            self.target.copy_(self.wire)


class Gradients:
    """The gradients of ``parameters``, which are of one type and train.

    Args:
        parameters: in the order of the model.
        stages: the stages here whose last ``REDUCE_GRAD`` completes them.
        replicas: who else holds the parameters; None for nobody.
        sharded: whether each replica gets its part of the sum only.
        counted: whether this rank's copy, or its part of the sum, may enter the gradient norm.
        bucket_bytes: gradients that one collective sums.

    Attributes:
        completing: for each bucket the parameter that comes first in the model, whose gradient is its last one.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        stages: frozenset[int],
        replicas: Replicas | None,
        sharded: bool,
        counted: bool,
        bucket_bytes: int,
    ) -> None:
        self.stages = stages
        self.replicas = replicas
        self.sharded = sharded and replicas is not None
        self.counted = counted
        self.layout = buffer_layout(
            [parameter.numel() for parameter in parameters],
            shards=replicas.number if self.sharded and replicas is not None else 1,
            bucket_size=bucket_bytes // gradient_dtype(parameters[0]).itemsize,
        )
        self.buffer = GradientBuffer(parameters, self.layout)
        self.parameters = self.buffer.parameters
        self._bucket_of = {id(p): self.layout.bucket_of(number) for number, p in enumerate(parameters)}
        first = {bucket: number for number, bucket in reversed(list(enumerate(self._bucket_of.values())))}
        self.completing = [self.parameters[first[bucket]] for bucket in range(len(self.layout.buckets))]
        self._missing: list[set[int]] = []
        self._started = 0
        self._sums: list[Transfer] = []

    @property
    def own(self) -> list[torch.Tensor]:
        """The parts of the flat buffer that this rank gets the sums of."""
        if not self.sharded or self.replicas is None:
            return [self.buffer.flat]
        parts = (self.layout.shard(bucket, self.replicas.index) for bucket in range(len(self.layout.buckets)))
        return [self.buffer.flat[begin:end] for begin, end in parts]

    def begin(self) -> None:
        """Begin a run: every gradient is still to come."""
        self.buffer.attach()
        self._started = 0
        self._missing = [set() for _ in self.layout.buckets]
        for parameter, bucket in self._bucket_of.items():
            self._missing[bucket].add(parameter)

    def arrived(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is complete."""
        bucket = self._bucket_of[id(parameter)]
        if bucket < self._started:
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} got a second gradient in one backward, when its sum "
                "over the replicas had begun. A layer that runs a backward inside its backward does that, as does "
                "torch's checkpoint with use_reentrant=True; pass use_reentrant=False"
            )
        self._missing[bucket].discard(id(parameter))

    @property
    def next_is_complete(self) -> bool:
        """Whether every gradient of the next bucket has arrived."""
        return not self._missing[self._started]

    def start_next(self) -> None:
        """Start the next bucket, whose gradients are complete."""
        bucket, replicas = self._started, self.replicas
        self._started += 1
        if replicas is None:
            return
        begin, end = self.layout.buckets[bucket]
        flat = self.buffer.flat[begin:end]
        wire = replicas.wire(flat)
        if self.sharded:
            mine = slice(*(place - begin for place in self.layout.shard(bucket, replicas.index)))
            pending = replicas.communicator.reduce_scatter(wire[mine], wire)
            self._sums.append(Transfer(pending, wire[mine], flat[mine]))
        else:
            self._sums.append(Transfer(replicas.communicator.all_reduce(wire), wire, flat))

    def finish(self) -> None:
        """Wait for the sums. Under sharding no parameter's gradient is whole then, so none keeps one."""
        for transfer in self._sums:
            transfer.finish()
        if self._sums and self.sharded:
            self.buffer.detach()
        self._sums.clear()

    @property
    def under_way(self) -> list[Pending]:
        """The sums that are started and not finished."""
        return [transfer.pending for transfer in self._sums]
