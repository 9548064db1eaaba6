"""The connection of one rank to the others of its job: the store, the roll call, and the group of all ranks.

What a rank listens on is bound to one interface, whatever started it. What the ranks do is not asked.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from chimera.errors import RunError, UsageError
from chimera.launch.interfaces import Interface, address_of, find_interface, interface_towards, is_loopback, loopback
from chimera.launch.place import Place
from chimera.launch.roll_call import call_roll
from chimera.launch.store import Endpoint, StoreFile, join_store, publish, read_published
from chimera.launch.store_holder import hold_store_apart

__all__ = ["Job", "connected", "joined"]

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_BEGUN: Final = "begun"
_LEFT: Final = "left"
_AFTER_SUCCESS_S: Final = 10.0
_AFTER_FAILURE_S: Final = 3.5
"""How long the rank whose launcher may end the store with it waits for the others to leave."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that this rank has joined.

    Attributes:
        group: all its ranks; None for a rank on its own, which needs none.
        restarts: how often the job was started again since its work began; equal on all ranks.
    """

    group: "dist.ProcessGroup | None"
    restarts: int
    _store: Store | None = None

    def work_began(self) -> None:
        """Have the store tell later attempts, where it outlives this one, that the job's work has begun."""
        if self._store is not None:
            self._store.set(_BEGUN, "")


@contextmanager
def connected(
    place: Place, *, timeout_s: float, interface: str | None = None, port: int = 0
) -> Iterator["dist.ProcessGroup | None"]:
    """Join the job as ``joined`` does, and yield the group of all its ranks; None for a rank on its own."""
    with joined(place, timeout_s=timeout_s, interface=interface, port=port) as job:
        yield job.group


@contextmanager
def joined(place: Place, *, timeout_s: float, interface: str | None = None, port: int = 0) -> Iterator[Job]:
    """Join the job of which this rank is one.

    Args:
        place: of this rank.
        timeout_s: how long to wait for the other ranks.
        interface: that the ranks meet over, by name, address or network; by default the loopback interface where all
            ranks are on one host, else the one that leads to the store.
        port: of the store, where the first rank is to hold it and no launcher has named one; 0 takes any that is free.

    Raises:
        UsageError: this host has no such interface, or the launcher has named another port.
        RunError: the store did not answer within the time-out, or a rank did not come.
    """
    if place.size == 1:
        yield Job(None, place.restarts)
        return
    here = _named(interface)
    with _meeting(place, here, port=port, timeout_s=timeout_s) as endpoint:
        _use_interface(here or _default(place, endpoint))
        try:
            root = join_store(endpoint, timeout_s=timeout_s)
            host = place.host or socket.gethostname()
            attempt = call_roll(root, place.rank, place.size, host=host, timeout_s=timeout_s)
            store = PrefixStore(attempt, root)
            dist.init_process_group(
                "gloo", store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=timeout_s)
            )
            restarts = _restarts(place, root)
            if place.holds_store and isinstance(place.store, StoreFile):
                # All have read it. What is killed later leaves none behind.
                place.store.path.unlink(missing_ok=True)
        except (RuntimeError, ValueError) as error:
            raise RunError(_not_joined(place, endpoint, error, timeout_s)) from error
        linger_s = _AFTER_FAILURE_S
        try:
            yield Job(dist.group.WORLD, restarts, root)
            linger_s = _AFTER_SUCCESS_S
        finally:
            dist.destroy_process_group()
            _leave(place, store, linger_s)


def _restarts(place: Place, root: Store) -> int:
    """Agree on how often the job was started again; an attempt that failed before its work began does not count.

    A launcher that has replaced a host counts from 0 there, so the largest count is the job's.
    """
    restarts = place.restarts
    if place.store_outlives:
        restarts = max(1, restarts) if root.check([_BEGUN]) else 0
    told = torch.tensor(restarts)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return int(told)


@contextmanager
def _meeting(place: Place, here: Interface | None, *, port: int, timeout_s: float) -> Iterator[Endpoint]:
    """Yield where the store is, which this rank holds if that is its part."""
    assert place.store is not None, "a rank among several knows where they meet"
    if isinstance(place.store, StoreFile):
        with _published(place, place.store, here, port=port, timeout_s=timeout_s) as endpoint:
            yield endpoint
        return
    if port not in {0, place.store.port}:
        raise UsageError(
            f"--runtime.port is {port}, but the launcher has the ranks meet at {place.store}; leave --runtime.port out"
        )
    if not place.holds_store:
        yield place.store
        return
    # All ranks were given one name; on this host it may stand for an address that no other reaches.
    address = here.address if here is not None else address_of(place.store.host)
    if place.spans_hosts and is_loopback(address):
        raise UsageError(
            f"MASTER_ADDR {place.store.host} is {address} on its own host, where no other reaches it; set MASTER_ADDR "
            "to an address on the network that the hosts share, or LOCAL_WORLD_SIZE where all ranks are on one host"
        )
    with hold_store_apart(address, place.store.port, option="MASTER_PORT") as bound:
        yield bound


@contextmanager
def _published(
    place: Place, file: StoreFile, here: Interface | None, *, port: int, timeout_s: float
) -> Iterator[Endpoint]:
    if not place.holds_store:
        yield read_published(file.path, timeout_s=timeout_s)
        return
    chosen = here or (interface_towards(file.towards) if place.spans_hosts else loopback())
    with hold_store_apart(chosen.address, port, option="--runtime.port") as bound, publish(file.path, bound):
        yield bound


def _named(interface: str | None) -> Interface | None:
    """Return the interface that was named by the option or by gloo's variable."""
    in_environment = os.environ.get(_GLOO)
    if interface is None:
        return find_interface(in_environment.split(",")[0]) if in_environment else None
    found = find_interface(interface)
    if in_environment and in_environment != found.name:
        raise UsageError(
            f"--runtime.interface {interface} is {found.name}, but {_GLOO} is {in_environment}; leave one of them out"
        )
    return found


def _default(place: Place, endpoint: Endpoint) -> Interface:
    return interface_towards(endpoint.host) if place.spans_hosts else loopback()


def _use_interface(interface: Interface) -> None:
    """Have gloo and NCCL listen on the interface; gloo would otherwise look up the host's name, NCCL take any."""
    os.environ.setdefault(_GLOO, interface.name)
    os.environ.setdefault(_NCCL, f"={interface.name}")


def _leave(place: Place, store: Store, linger_s: float) -> None:
    """Leave the job; the rank that holds the store does so last, or after ``linger_s``."""
    deadline = time.monotonic() + linger_s
    with suppress(RuntimeError):
        gone = store.add(_LEFT, 1)
        while place.holds_store and gone < place.size and time.monotonic() < deadline:
            time.sleep(0.01)
            gone = store.add(_LEFT, 0)


def _not_joined(place: Place, endpoint: Endpoint, error: Exception, timeout_s: float) -> str:
    reason = str(error).strip().splitlines()[0]
    return (
        f"rank {place.rank} could not join the job at {endpoint}: {reason}; see whether the other ranks have started, "
        f"and raise --runtime.timeout-s ({timeout_s:g}) if they are slow to"
    )
