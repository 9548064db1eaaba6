"""Where a rank stands in its job, as its launcher says it.

A launcher is ours (``chimera.launch.local``) or one that sets torch's variables, such as torchrun. This module reads
variables; it opens no connection and does not ask what the ranks do.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from chimera.errors import UsageError
from chimera.launch.interfaces import is_local_name
from chimera.launch.store import Endpoint, StoreFile

__all__ = ["Place", "place_from_environment", "use_cores"]

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place.

    Attributes:
        rank, size: in the world.
        local_rank, local_size: among the ranks of this host.
        store: where the ranks meet; None for a rank on its own.
        holds_store: whether this rank is the one that holds the store, rather than whoever started it.
        spans_hosts: whether other ranks may be on other hosts.
        restarts: how often the job was started again after a failure.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: Endpoint | StoreFile | None = None
    holds_store: bool = False
    spans_hosts: bool = False
    restarts: int = 0


def place_from_environment(environ: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun's variables give, or None when no launcher started this process.

    Raises:
        UsageError: RANK or WORLD_SIZE is set without the others, or one is not what it has to be.
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
    store = Endpoint(environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))
    if not 0 < store.port < 65536:
        raise UsageError(f"MASTER_PORT is {store.port}; needed: a port in 1…65535, the same on every rank")
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    return Place(
        rank,
        size,
        local_rank=_number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank,
        local_size=local_size or size,
        store=store,
        # The agents of torchrun keep one store for all attempts.
        holds_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        spans_hosts=local_size != size and not is_local_name(store.host),
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environ else 0,
    )


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
