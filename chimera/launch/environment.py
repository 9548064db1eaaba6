"""Where a rank stands in its job, as its launcher says it, and the connection to the others.

A launcher is ours (``chimera.launch.local``) or one that sets torch's variables, such as torchrun. This module reads
those five variables, joins the job's store and gives the process group of all ranks. What the ranks do is not asked.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

from chimera.errors import RunError, UsageError

__all__ = ["LOOPBACK", "Place", "connected", "place_from_environment", "use_cores"]

LOOPBACK: Final = "127.0.0.1"
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place.

    Attributes:
        rank, size: in the world.
        local_rank, local_size: among the ranks of this host.
        port: of the store that our own launcher holds on the loopback interface; None where another launcher's
            variables say how to meet.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    port: int | None = None


def place_from_environment(environ: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun's variables give, or None when no launcher started this process.

    Raises:
        UsageError: RANK or WORLD_SIZE is set without the others, or one is no number.
    """
    if not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        given = " and ".join(name for name in _NEEDED if environ.get(name))
        raise UsageError(
            f"the environment sets {given} but not {', '.join(missing)}, so this process is part of a job that it "
            "cannot find; start it by torchrun, or unset RANK and WORLD_SIZE to have the ranks started here"
        )
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank} with WORLD_SIZE {size}; needed: a rank in 0…{size - 1}")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else size
    return Place(rank, size, local_rank, local_size)


@contextmanager
def connected(place: Place, *, timeout_s: float) -> Iterator["dist.ProcessGroup | None"]:
    """Join the job and yield the group of all its ranks; None for a rank on its own, which needs none.

    Raises:
        RunError: the job's store did not answer within the time-out.
    """
    if place.size == 1:
        yield None
        return
    timeout = timedelta(seconds=timeout_s)
    try:
        if place.port is None:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            # Gloo would otherwise look up the host's name, and listen beyond the loopback interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
            store = TCPStore(LOOPBACK, place.port, is_master=False, timeout=timeout)
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"rank {place.rank} could not join the job: {reason}; see whether the other ranks have started, and raise "
            f"--runtime.timeout-s ({timeout_s:g}) if they are slow to"
        ) from error
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def use_cores(place: Place) -> None:
    """Give torch this rank's share of the cores, unless OMP_NUM_THREADS says how many threads it is to have."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // place.local_size))


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(f"the environment variable {name} is {environ[name]!r}; needed: a whole number") from None


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
