"""What messages and all-reduces between the ranks of a job take, measured by the ranks together.

Either over the default process group as it stands, or over the very channels of a pipeline. Who started the ranks, and
what they do otherwise, is not asked.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from chimera.runtime.groups import Channel, Groups
from chimera.tensor.communicator import Communicator

__all__ = ["ChannelTime", "LinkTimes", "time_channels", "time_links", "time_reductions"]

_SMALL_BYTES: Final = 4
_LARGE_BYTES: Final = 4 * 2**20
_EXCHANGES: Final = 15
_REDUCTIONS: Final = 3


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds of a message's latency, of a step of a ring, of a collective beyond its steps; and the links' rate."""

    hop_s: float
    step_s: float
    collective_s: float
    bytes_per_s: float


def time_links(rank: int, size: int) -> LinkTimes:
    """Measure; a collective over all ``size`` ranks of the default group.

    Messages go between the first two ranks.
    """
    small, large = (_round_trip(rank, count) / 2 for count in (_SMALL_BYTES, _LARGE_BYTES))
    summed = [_all_reduce(count) for count in (_SMALL_BYTES, _LARGE_BYTES)]
    steps = 2 * (size - 1)
    by_message = _LARGE_BYTES / max(large - small, 1e-9)
    by_ring = steps / size * _LARGE_BYTES / max(summed[1] - summed[0], 1e-9)
    # Half of a small sum goes to the ring's steps, half to waiting for one another: they cannot be told apart here.
    return LinkTimes(
        hop_s=small,
        step_s=summed[0] / 2 / steps,
        collective_s=summed[0] / 2,
        bytes_per_s=min(by_message, by_ring),
    )


def _round_trip(rank: int, size: int) -> float:
    """Return the median time of a message from rank 0 to rank 1 and back; other ranks look on."""
    tensor = torch.zeros(max(size // 4, 1))
    times = []
    for _ in range(_EXCHANGES):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _all_reduce(size: int) -> float:
    tensor = torch.zeros(max(size // 4, 1))
    times = []
    for _ in range(_EXCHANGES):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class ChannelTime:
    """What messages between two ranks of a pipeline take, nothing else being under way on theirs.

    Attributes:
        ranks: of the pipeline.
        route: whose messages go this way.
        message_s: a message of ``num_bytes``, one way.
        latency_s: one of a few bytes.
        num_bytes: of the large one.
    """

    ranks: tuple[int, int]
    route: int
    message_s: float
    latency_s: float
    num_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """Rate beyond the latency."""
        return self.num_bytes / max(self.message_s - self.latency_s, 1e-9)


def time_channels(groups: Groups, channels: Sequence[Channel], num_bytes: int) -> tuple[ChannelTime, ...]:
    """Send messages to and fro over each pair of opposite channels, one pair after another; a collective.

    Args:
        groups: whose channels are idle.
        channels: all of the schedule's, the same on every rank.
        num_bytes: of a large message.
    """
    pairs = sorted({(*sorted(channel[:2]), channel[2]) for channel in channels})
    mine = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for number, (first, second, route) in enumerate(pairs):
        groups.sum_everywhere(torch.zeros(1))
        if groups.pipeline_rank in (first, second):
            sizes = (num_bytes, _SMALL_BYTES)
            mine[number] = torch.tensor([_exchange(groups, first, second, route, size) for size in sizes])
    # Of all pipelines the slowest; both ends measured much the same.
    slowest = torch.stack(groups.gather(mine)).amax(0).tolist()
    return tuple(
        ChannelTime((first, second), route, large, min(small, large), num_bytes)
        for (first, second, route), (large, small) in zip(pairs, slowest, strict=True)
    )


def _exchange(groups: Groups, first: int, second: int, route: int, size: int) -> float:
    """Return the median time of a message between two ranks, half a round trip; both of them call this."""
    there, back = groups.channels[first, second, route], groups.channels[second, first, route]
    device = "cpu" if groups.staged_on_cpu else groups.device
    tensor = torch.zeros(max(1, size), dtype=torch.uint8, device=device)
    times = []
    for _ in range(_EXCHANGES):
        begin = time.perf_counter()
        if groups.pipeline_rank == first:
            there.send(tensor).wait()
            back.receive(tensor).wait()
        else:
            there.receive(tensor).wait()
            back.send(tensor).wait()
        if groups.device.type == "cuda":
            torch.cuda.synchronize(groups.device)
        times.append(time.perf_counter() - begin)
    # Of the first, one of the two waited for the other to begin.
    return statistics.median(times[1:]) / 2


def time_reductions(groups: Groups, gradient_bytes: Sequence[float], *, sharded: bool) -> list[float]:
    """Return what the reduction of each stage's gradients takes, one stage after another; a collective.

    Measured apart, since reductions under way together share a link, and each alone would pass for as slow as all.

    Args:
        groups: whose communicators are idle.
        gradient_bytes: [stage].
        sharded: whether each replica gets a part of the sums only.
    """
    mine = torch.zeros(len(gradient_bytes), dtype=torch.float64)
    device = torch.device("cpu") if groups.staged_on_cpu else groups.device
    for stage, size in enumerate(gradient_bytes):
        groups.sum_everywhere(torch.zeros(1))
        replicas = groups.stages.get(stage)
        if replicas is not None and size:
            count = len(replicas.ranks)
            flat = torch.zeros(-(-round(size) // (4 * count)) * count, device=device)
            mine[stage] = statistics.median(_reduction(replicas, flat, sharded=sharded) for _ in range(_REDUCTIONS))
    slowest: list[float] = torch.stack(groups.gather(mine)).amax(0).tolist()
    return slowest


def _reduction(replicas: Communicator, flat: torch.Tensor, *, sharded: bool) -> float:
    begin = time.perf_counter()
    if sharded:
        replicas.reduce_scatter(flat[: len(flat) // len(replicas.ranks)].clone(), flat).wait()
    else:
        replicas.all_reduce(flat).wait()
    if flat.device.type == "cuda":
        torch.cuda.synchronize(flat.device)
    return time.perf_counter() - begin
