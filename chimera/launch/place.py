"""One rank's place in a job: its number, where its peers are met, and what its launcher expects of it.

A place is a value; whoever starts ranks makes one for each, or a rank makes its own from the launcher's variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from chimera.errors import UsageError
from chimera.launch.store import Endpoint, StoreFile

__all__ = ["Place", "use_cores", "whole_number"]


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
        store_outlives: whether the store outlives an attempt, and so knows whether the job's work had begun, which the
            count of restarts does not say.
        host: what the launcher calls this host; None where its own name does.
        cores: this rank's share of them; None for an equal one of all.
        size_option: how the launcher is told the number of ranks, which stands for ``{}``.
        ends_with_parent: whether the process that started this one is to live as long, such as torchrun's agent.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: Endpoint | StoreFile | None = None
    holds_store: bool = False
    spans_hosts: bool = False
    restarts: int = 0
    store_outlives: bool = False
    host: str | None = None
    cores: int | None = None
    size_option: str = "WORLD_SIZE={}"
    ends_with_parent: bool = False


def use_cores(place: Place) -> None:
    """Give torch this rank's share of the cores, or as many threads as OMP_NUM_THREADS says."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if said.isdecimal() and int(said):
        # Torch reads it when it is loaded, which for a forked process was before the variable had this value.
        torch.set_num_threads(int(said))
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A launcher that binds each rank to its share has divided the cores already.
    share = cores // place.local_size if place.cores is None else min(cores, place.cores)
    torch.set_num_threads(max(1, share))


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Return the value of a variable that holds a number from 0 on.

    Raises:
        UsageError: it holds something else.
    """
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"the environment variable {name} is {text!r}; needed: a whole number")
    return int(text)
