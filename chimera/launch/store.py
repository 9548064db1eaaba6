"""The store of a job: the one socket that somebody listens on before the ranks know each other.

It is bound to one address, to a port that is free at that moment unless one is named, and what was bound is what others
are told: by whoever starts them, or through a file that all ranks see. Whoever holds it may be a rank or, better, a
process that outlives all of them.
"""

import errno
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

from chimera.errors import RunError
from chimera.ir.files import making_folder, replacing
from chimera.launch.interfaces import LOOPBACK

__all__ = ["Endpoint", "StoreFile", "hold_store", "join_store", "listening", "publish", "read_published", "serve"]

_HOLDER_WAITS_S: Final = 30
_LOOK_S: Final = 0.1
_PENDING: Final = 1024
"""Connections that may wait to be accepted: about as many ranks as start at once."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a job's store listens: a host's name or address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file by which the first rank tells the others where it holds the store.

    Attributes:
        path: in a folder that all hosts share, of a name that no other job or attempt has.
        towards: a host that all ranks reach; the interface that leads there is the default one.
    """

    path: Path
    towards: str


@contextmanager
def hold_store(address: str = LOOPBACK, port: int = 0, *, option: str = "--runtime.port") -> Iterator[Endpoint]:
    """Hold a job's store and yield where it is.

    Args:
        address: numeric, of one interface of this host; nothing listens on the others.
        port: 0 takes any that is free.
        option: what sets the port, for messages.

    Raises:
        RunError: the port is taken, or the address is not this host's.
    """
    listener = listening(address, port, option)
    endpoint = Endpoint(address, listener.getsockname()[1])
    with serve(listener, endpoint):
        yield endpoint


@contextmanager
def serve(listener: socket.socket, endpoint: Endpoint) -> Iterator[None]:
    """Hold a store on a socket that listens at ``endpoint``, for as long as the context lasts."""
    # The store takes over a socket that is bound already: given an address it would listen on every interface.
    store = TCPStore(
        endpoint.host,
        endpoint.port,
        is_master=True,
        timeout=timedelta(seconds=_HOLDER_WAITS_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield
    finally:
        # Named so that it lives until here.
        del store


def join_store(endpoint: Endpoint, *, timeout_s: float) -> TCPStore:
    """Connect to a store that somebody holds, or will within the time-out.

    Raises:
        RunError: nobody does.
    """
    # Asked first by a socket of our own: torch's says why it fails in pages of addresses of its code.
    _await_listener(endpoint, timeout_s)
    return TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _await_listener(endpoint: Endpoint, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((endpoint.host, endpoint.port), max(_LOOK_S, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"no job answers at {endpoint}: {error.strerror or error}; see whether the first rank has started, "
                    f"and raise --runtime.timeout-s ({timeout_s:g}) if it is slow to"
                ) from error
        time.sleep(_LOOK_S)


@contextmanager
def publish(path: Path, endpoint: Endpoint) -> Iterator[None]:
    """Write where the store is, for as long as the context lasts."""
    with making_folder(path.parent):
        try:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps({"host": endpoint.host, "port": endpoint.port}), encoding="utf-8")
            yield
        finally:
            path.unlink(missing_ok=True)


def read_published(path: Path, *, timeout_s: float) -> Endpoint:
    """Wait until the first rank has published where its store is, and return it.

    Raises:
        RunError: it has not within the time-out.
    """
    deadline = time.monotonic() + timeout_s
    while not _appeared(path):
        if time.monotonic() > deadline:
            raise RunError(
                f"the first rank did not write {path} within {timeout_s:g} s, so there is no job to join; see whether "
                "it has started, and whether all hosts share that folder (--train.out)"
            )
        time.sleep(_LOOK_S)
    told = json.loads(path.read_text(encoding="utf-8"))
    return Endpoint(told["host"], told["port"])


def _appeared(path: Path) -> bool:
    # Listing the folder makes a network file system look again; asking for a file that was missing may not.
    return path.parent.is_dir() and any(entry.name == path.name for entry in path.parent.iterdir())


def listening(address: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens on one address; see ``hold_store``."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_PENDING)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise RunError(
                f"{address} is no address of this host, but this is the first rank; set MASTER_ADDR to an address of "
                "the host that has rank 0"
            ) from error
        raise RunError(
            f"port {port} on {address} cannot be used: {error.strerror or error}; set {option} to another one"
            + (", or to 0 for any that is free" if option == "--runtime.port" else "")
        ) from error
    return listener
