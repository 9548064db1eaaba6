"""Who this rank is, and the communicators it may use, as one object that is passed down.

Ranks are numbered as ``RankGrid`` does it: pipeline outermost, tensor-parallel ranks adjacent. Every communicator of a
run, but that of tensor-parallel ranks, which layers are built with, is made here: in one order that all its members
share, under a prefix of the store that no other run uses. Asking never creates one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from chimera.ir.schedule import Placement
from chimera.plan.ranks import Place, RankGrid
from chimera.runtime import shared_memory
from chimera.runtime.links import CommunicatorLink, Link
from chimera.tensor.communicator import Communicator, default_backend, own_store
from chimera.tensor.parallel import ALONE, TensorParallel

__all__ = ["Channel", "Groups"]

Channel = tuple[int, int, int]
"""A directed edge (source pipeline rank, destination pipeline rank, route), forward and backward together."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Groups:
    """This rank's place and communicators; a group of one rank is None, and needs no communication.

    Attributes:
        rank: the rank in the world.
        grid: all ranks.
        tensor: those that share their layers with this one.
        device: where parameters and activations live.
        control: all ranks, on CPU tensors: losses, counts, norms, agreement on shapes.
        stages: for each stage held here, the group of its replicas (routes × d) with the same share of each layer.
        copies: for each stage held here, the group that sums what the tensor-parallel ranks have a summand of each
            (routes × d × t); empty where there are no such parameters.
        tied: for each tied group held here, by number, the group of its holders (with their replicas; with all
            tensor-parallel ranks where each has a summand).
        channels: this rank's end of each of its channels. On NCCL each has a communicator of its own; on gloo they
            share one and the route is the tag; two ranks of one host share memory unless gloo was asked for by name.
    """

    rank: int
    grid: RankGrid
    tensor: TensorParallel
    device: torch.device
    timeout: timedelta
    store: Store | None
    control: Communicator | None
    stages: dict[int, Communicator | None]
    copies: dict[int, Communicator | None]
    tied: dict[int, Communicator | None]
    channels: dict[Channel, Link]
    staged_on_cpu: bool

    @classmethod
    def create(
        cls,
        world: "dist.ProcessGroup | None",
        placement: Placement,
        *,
        tensor: TensorParallel = ALONE,
        tied_stages: Sequence[Iterable[int]] = (),
        tied_partial: Sequence[bool] = (),
        channels: Iterable[Channel] = (),
        device: torch.device | None = None,
        backend: str | None = None,
        timeout_s: float = 600.0,
    ) -> "Groups":
        """Make every communicator of a run; all ranks of ``world`` call this with equal arguments.

        Args:
            world: t · d · p ranks, pipeline outermost; None for a process on its own.
            placement: where the stages live.
            tensor: the ranks that share their layers with this one.
            tied_stages: for each tied group of parameters, the stages that hold it.
            tied_partial: for each, whether tensor-parallel ranks have a summand of its gradient each.
            channels: all edges that carry messages.
            device: where the model lives; the CPU by default.
            backend: "gloo" or "nccl"; by default nccl where every rank has a CUDA device of its own, and otherwise
                gloo with shared memory between the ranks of one host. Both of these stage messages and gradients of a
                CUDA device through the CPU.
            timeout_s: how long an operation waits for its peers.

        Raises:
            UsageError: t · p does not divide the world size.
        """
        size, rank = (world.size(), world.rank()) if world is not None else (1, 0)
        grid = RankGrid.of_world(size, pipeline=placement.num_ranks, tensor=tensor.size)
        place = grid.place(rank)
        assert place.tensor == tensor.rank, "tensor-parallel ranks are adjacent"
        device = device or torch.device("cpu")
        timeout = timedelta(seconds=timeout_s)
        store = own_store(world)
        by_name, backend = backend, backend or default_backend(store, rank, size, device)

        def make(name: str, places: Iterable[int], kind: str, *, every_share: bool = False) -> Communicator | None:
            ranks = grid.holders(rank, places)
            if every_share:
                ranks = tuple(sorted(other for holder in ranks for other in grid.tensor_group(holder)))
            else:
                name = f"{name}-{place.tensor}"
            return _communicator(kind, name, ranks, rank=rank, store=store, timeout=timeout)

        control = make("control", range(placement.num_ranks), "gloo", every_share=True)
        here = placement.stages_on(place.pipeline)
        stages = {s: make(f"stage{s}", placement.ranks_of(s), backend) for s in here}
        copies = {
            s: make(f"copies{s}", placement.ranks_of(s), backend, every_share=True)
            for s in here
            if tensor.divides_sequence
        }
        tied = {}
        for number, held_by in enumerate(tied_stages):
            holders = {r for stage in held_by for r in placement.ranks_of(stage)}
            if place.pipeline in holders:
                partial = bool(tied_partial) and tied_partial[number]
                tied[number] = make(f"tied{number}", holders, backend, every_share=partial)
        links = _links(
            sorted(channels),
            rank=rank,
            width=grid.width,
            backend=backend,
            share_memory=by_name is None and backend == "gloo",
            store=store,
            timeout=timeout,
        )
        return cls(
            rank=rank,
            grid=grid,
            tensor=tensor,
            device=device,
            timeout=timeout,
            store=store,
            control=control,
            stages=stages,
            copies=copies,
            tied=tied,
            channels=links,
            staged_on_cpu=backend == "gloo" and device.type == "cuda",
        )

    @property
    def pipeline_rank(self) -> int:
        """This rank's place in its pipeline, 0…p-1."""
        return self.grid.place(self.rank).pipeline

    @property
    def data_rank(self) -> int:
        """Which data-parallel replica this rank belongs to, 0…d-1."""
        return self.grid.place(self.rank).data

    @property
    def data_size(self) -> int:
        """Replicas of the pipeline, d."""
        return self.grid.data

    @property
    def pipeline_size(self) -> int:
        """Ranks of a pipeline, p."""
        return self.grid.pipeline

    @property
    def size(self) -> int:
        """All ranks, t · d · p."""
        return self.grid.size

    def world_rank(self, pipeline_rank: int) -> int:
        """Return the world rank of another rank of this rank's pipeline."""
        return self.grid.pipeline_group(self.rank)[pipeline_rank]

    def first_replica(self, pipeline_rank: int) -> int:
        """Return the world rank at this place of the first replica's pipeline, with this rank's share of each layer."""
        return self.grid.rank(Place(self.tensor.rank, 0, pipeline_rank))

    def abort(self) -> None:
        """Make every operation that this rank waits for fail at once."""
        of_parameters = (*self.stages.values(), *self.copies.values(), *self.tied.values())
        for communicator in (self.control, self.tensor.communicator, *of_parameters):
            if communicator is not None:
                communicator.abort()
        for link in self.channels.values():
            link.abort()

    def sum_everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over all ranks, in place, and wait."""
        if self.control is not None:
            self.control.all_reduce(values).wait()
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's CPU tensor, in rank order; all have one shape."""
        return [values] if self.control is None else self.control.gather(values)


def _links(
    channels: Sequence[Channel],
    *,
    rank: int,
    width: int,
    backend: str,
    share_memory: bool,
    store: Store | None,
    timeout: timedelta,
) -> dict[Channel, Link]:
    """Make this rank's ends of the channels of its pipeline, all of which ``channels`` lists.

    Of ``width`` · p ranks, those with the same remainder are one pipeline.
    """
    if store is None:
        return {}
    pipeline_rank, pipeline = divmod(rank, width)
    ends = {c: tuple(end * width + pipeline for end in c[:2]) for c in channels}
    hosts = _hosts(store, rank, sorted({end for pair in ends.values() for end in pair})) if share_memory else {}
    near = {c for c, (source, destination) in ends.items() if hosts and hosts[source] == hosts[destination] != ""}
    far = [channel for channel in channels if channel not in near]
    made: dict[Channel, Link] = {}
    if any(pipeline_rank in channel[:2] for channel in near):
        sending = {c: ends[c][1] for c in sorted(near) if c[0] == pipeline_rank}
        receiving = {c: ends[c][0] for c in sorted(near) if c[1] == pipeline_rank}
        made.update(shared_memory.connect(sending, receiving, rank=rank, store=store, timeout=timeout))
    # On gloo, one for all; only ranks that will hold on to it: one that dropped it at once would close connections
    # still being made.
    everyone = sorted({end for channel in far for end in ends[channel]})
    together = _communicator("gloo", f"messages-{pipeline}", everyone, rank=rank, store=store, timeout=timeout)
    for channel in far:
        source, destination, route = channel
        if pipeline_rank not in (source, destination):
            continue
        name = f"channel{source}-{destination}-{route}-{pipeline}"
        communicator = (
            together
            if backend == "gloo"
            else _communicator(backend, name, sorted(ends[channel]), rank=rank, store=store, timeout=timeout)
        )
        if communicator is not None:
            peer = next(end for end in ends[channel] if end != rank)
            made[channel] = CommunicatorLink(communicator, peer, route)
    return made


def _hosts(store: Store, rank: int, ranks: Sequence[int]) -> dict[int, str]:
    """Tell the others which host this rank is on, and learn theirs; "" where it cannot share memory."""
    store.set(f"host/{rank}", shared_memory.host_identity() or "")
    return {other: store.get(f"host/{other}").decode() for other in ranks} if rank in ranks else {}


def _communicator(
    backend: str, name: str, ranks: Sequence[int], *, rank: int, store: Store | None, timeout: timedelta
) -> Communicator | None:
    """Join the communicator ``name`` of ``ranks``, or return None when this rank is alone or not among them."""
    if rank not in ranks or len(ranks) == 1 or store is None:
        return None
    return Communicator(backend, PrefixStore(name, store), ranks, rank, timeout)
