"""The ranks of one job as processes of this host, over a store that only the loopback interface can reach.

The parent holds the store, so that the last words of a job outlive any rank; it computes nothing. Ports, addresses and
threads are decided here, processes are watched in ``chimera.launch.processes``.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

from chimera.errors import RunError
from chimera.launch.environment import LOOPBACK, Place
from chimera.launch.processes import Main, start_method, watch

__all__ = ["run_local", "warm_up"]


def warm_up(modules: Sequence[str] = ()) -> None:
    """Start loading torch and ``modules`` in the process that ranks are forked from, and return at once.

    Without this the first ``run_local`` does it. It takes about as long as ``import torch``, which the caller can
    spend on something else. Where the process exists already, nothing happens.
    """
    context = start_method()
    context.set_forkserver_preload(["chimera.launch.environment", *modules])
    forkserver.ensure_running()


def run_local(
    main: Main,
    size: int,
    *,
    port: int = 0,
    preload: Sequence[str] = (),
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run ``main(place, tell)`` on ``size`` ranks and return what each returned, in rank order.

    Args:
        main: a picklable function, called in a process of its own per rank; what it tells reaches ``on_message``.
        size: ranks to start.
        port: of the job's store on 127.0.0.1; 0 takes any free one.
        preload: modules that ``main`` needs, loaded once for all ranks.
        on_message: called in this process with (rank, message).

    Raises:
        ChimeraError: what a rank raised; the cause rather than what followed from it.
        RunError: a rank died, or the port is taken. By the time it is raised every rank has ended.
    """
    warm_up(preload)
    with closing(_listening(port)) as listener:
        # The store takes over a socket that is bound already: given an address it would listen on every interface.
        bound = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            bound,
            is_master=True,
            timeout=timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    places = [Place(rank, size, rank, size, bound) for rank in range(size)]
    try:
        return watch(main, places, on_message=on_message)
    finally:
        # Named so that it lives until every rank has ended.
        del store


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise RunError(
            f"port {port} on {LOOPBACK} cannot be used: {error.strerror or error}; set --runtime.port to another one, "
            "or to 0 for any that is free"
        ) from error
    return listener
