"""Who this rank is, and the communicators it may use, as one object that is passed down.

Ranks are numbered pipeline outermost: rank = pipeline_rank · d + data_rank. Every communicator of a run is made here,
in one order that all its members share, under a prefix of the store that no other run uses; asking never creates one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from chimera.errors import UsageError
from chimera.ir.schedule import Placement
from chimera.runtime import shared_memory
from chimera.runtime.communicator import Communicator
from chimera.runtime.links import CommunicatorLink, Link

__all__ = ["Channel", "Groups", "check_world_size"]

Channel = tuple[int, int, int]
"""A directed edge (source pipeline rank, destination pipeline rank, route), forward and backward together."""


def check_world_size(world_size: int, pipeline: int, data: int | None = None) -> int:
    """Return the number of data-parallel replicas d, where ``world_size`` = p · d.

    Raises:
        UsageError: p (or p · d) does not make up the world size; the nearest legal ones are named.
    """
    if data is None:
        if world_size % pipeline == 0 and world_size:
            return world_size // pipeline
        below, above = world_size // pipeline * pipeline, -(-world_size // pipeline) * pipeline
        legal = " or ".join(str(n) for n in dict.fromkeys((below, above)) if n)
        factors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise UsageError(
            f"world size {world_size} is not a multiple of the schedule's p = {pipeline} pipeline ranks (p · d must "
            f"equal it); start {legal} processes, or take a schedule with p among {factors}"
        )
    if pipeline * data != world_size:
        nearest = ", ".join(str((p, world_size // p)) for p in range(1, world_size + 1) if world_size % p == 0)
        raise UsageError(
            f"world size {world_size}, but p = {pipeline} times d = {data} makes {pipeline * data}; start "
            f"{pipeline * data} processes, or set (p, d) to one of {nearest}"
        )
    return data


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Groups:
    """This rank's place and communicators; a group of one rank is None, and needs no communication.

    Attributes:
        rank, pipeline_size, data_size: the rank in the world, p and d.
        device: where parameters and activations live.
        control: all ranks, on CPU tensors: losses, counts, norms, agreement on shapes.
        stages: for each stage held here, the group of its replicas (routes × d).
        tied: for each tied group held here, by number, the group of its holders (with their replicas).
        channels: this rank's end of each of its channels. On NCCL each has a communicator of its own; on gloo they
            share one and the route is the tag; two ranks of one host share memory unless gloo was asked for by name.
    """

    rank: int
    pipeline_size: int
    data_size: int
    device: torch.device
    timeout: timedelta
    store: Store | None
    control: Communicator | None
    stages: dict[int, Communicator | None]
    tied: dict[int, Communicator | None]
    channels: dict[Channel, Link]
    staged_on_cpu: bool

    @classmethod
    def create(
        cls,
        world: "dist.ProcessGroup | None",
        placement: Placement,
        *,
        tied_stages: Sequence[Iterable[int]] = (),
        channels: Iterable[Channel] = (),
        device: torch.device | None = None,
        backend: str | None = None,
        timeout_s: float = 600.0,
    ) -> "Groups":
        """Make every communicator of a run; all ranks of ``world`` call this with equal arguments.

        Args:
            world: p · d ranks, pipeline outermost; None for a process on its own.
            placement: where the stages live.
            tied_stages: for each tied group of parameters, the stages that hold it.
            channels: all edges that carry messages.
            device: where the model lives; the CPU by default.
            backend: "gloo" or "nccl"; by default nccl where every rank has a CUDA device of its own, and otherwise
                gloo with shared memory between the ranks of one host. Both of these stage messages and gradients of a
                CUDA device through the CPU.
            timeout_s: how long an operation waits for its peers.

        Raises:
            UsageError: p does not divide the world size.
        """
        size, rank = (world.size(), world.rank()) if world is not None else (1, 0)
        data_size = check_world_size(size, placement.num_ranks)
        device = device or torch.device("cpu")
        timeout = timedelta(seconds=timeout_s)
        store = world.get_group_store() if world is not None else None
        if store is not None:
            # Each rank counts its own calls, and all make the same calls: equal numbers without a message.
            store = PrefixStore(f"chimera/{store.add(f'chimera/runs/{rank}', 1)}", store)
        by_name, backend = backend, backend or _default_backend(store, rank, size, device)
        pipeline_rank = rank // data_size

        def make(name: str, pipeline_ranks: Iterable[int], kind: str) -> Communicator | None:
            ranks = sorted(p * data_size + d for p in set(pipeline_ranks) for d in range(data_size))
            return _communicator(kind, name, ranks, rank=rank, store=store, timeout=timeout)

        everyone = range(placement.num_ranks)
        control = make("control", everyone, "gloo")
        stages = {s: make(f"stage{s}", placement.ranks_of(s), backend) for s in placement.stages_on(pipeline_rank)}
        tied = {}
        for number, held_by in enumerate(tied_stages):
            holders = {r for stage in held_by for r in placement.ranks_of(stage)}
            if pipeline_rank in holders:
                tied[number] = make(f"tied{number}", holders, backend)
        links = _links(
            sorted(channels),
            rank=rank,
            data_size=data_size,
            backend=backend,
            share_memory=by_name is None and backend == "gloo",
            store=store,
            timeout=timeout,
        )
        return cls(
            rank=rank,
            pipeline_size=placement.num_ranks,
            data_size=data_size,
            device=device,
            timeout=timeout,
            store=store,
            control=control,
            stages=stages,
            tied=tied,
            channels=links,
            staged_on_cpu=backend == "gloo" and device.type == "cuda",
        )

    @property
    def pipeline_rank(self) -> int:
        """This rank's place in its pipeline, 0…p-1."""
        return self.rank // self.data_size

    @property
    def data_rank(self) -> int:
        """Which data-parallel replica this rank belongs to, 0…d-1."""
        return self.rank % self.data_size

    @property
    def size(self) -> int:
        """All ranks, p · d."""
        return self.pipeline_size * self.data_size

    def world_rank(self, pipeline_rank: int) -> int:
        """Return the world rank of another rank of this replica's pipeline."""
        return pipeline_rank * self.data_size + self.data_rank

    def abort(self) -> None:
        """Make every operation that this rank waits for fail at once."""
        for communicator in (self.control, *self.stages.values(), *self.tied.values()):
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


def _default_backend(store: Store | None, rank: int, size: int, device: torch.device) -> str:
    """Choose NCCL where all ranks have a CUDA device each; it refuses two ranks on one device."""
    if device.type != "cuda" or store is None or not dist.is_nccl_available():
        return "gloo"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", uuid)
    devices = [store.get(f"device/{other}") for other in range(size)]
    return "nccl" if len(set(devices)) == size else "gloo"


def _links(
    channels: Sequence[Channel],
    *,
    rank: int,
    data_size: int,
    backend: str,
    share_memory: bool,
    store: Store | None,
    timeout: timedelta,
) -> dict[Channel, Link]:
    """Make this rank's ends of the channels of its replica's pipeline, all of which ``channels`` lists."""
    if store is None:
        return {}
    pipeline_rank, data_rank = divmod(rank, data_size)
    ends = {c: tuple(end * data_size + data_rank for end in c[:2]) for c in channels}
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
    together = _communicator("gloo", f"messages-{data_rank}", everyone, rank=rank, store=store, timeout=timeout)
    for channel in far:
        source, destination, route = channel
        if pipeline_rank not in (source, destination):
            continue
        name = f"channel{source}-{destination}-{route}-{data_rank}"
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
    backend: str, name: str, ranks: list[int], *, rank: int, store: Store | None, timeout: timedelta
) -> Communicator | None:
    """Join the communicator ``name`` of ``ranks``, or return None when this rank is alone or not among them."""
    if rank not in ranks or len(ranks) == 1 or store is None:
        return None
    return Communicator(backend, PrefixStore(name, store), ranks, rank, timeout)
