"""What messages and all-reduces between the ranks of a job take, measured by the ranks together.

The default process group is used as it stands; who started the ranks, and what they do otherwise, is not asked.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

__all__ = ["LinkTimes", "time_links"]

_SMALL_BYTES: Final = 4
_LARGE_BYTES: Final = 4 * 2**20
_EXCHANGES: Final = 15


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
