"""The ranks of one job as processes of this host, over a store that only this host can reach unless asked otherwise.

The parent holds the store, so that the last words of a job outlive any rank; it computes nothing. Ports, addresses and
threads are decided here, processes are watched in ``chimera.launch.processes``.
"""

from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any

from chimera.launch.interfaces import LOOPBACK, find_interface
from chimera.launch.place import Place
from chimera.launch.processes import Main, start_method, watch
from chimera.launch.store import hold_store

__all__ = ["run_local", "warm_up"]


def warm_up(modules: Sequence[str] = ()) -> None:
    """Start loading torch and ``modules`` in the process that ranks are forked from, and return at once.

    Without this the first ``run_local`` does it. It takes about as long as ``import torch``, which the caller can
    spend on something else. Where the process exists already, nothing happens.
    """
    context = start_method()
    context.set_forkserver_preload(["chimera.launch.connect", *modules])
    forkserver.ensure_running()


def run_local(
    main: Main,
    size: int,
    *,
    port: int = 0,
    interface: str | None = None,
    restarts: int = 0,
    preload: Sequence[str] = (),
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run ``main(place, tell)`` on ``size`` ranks and return what each returned, in rank order.

    Args:
        main: a picklable function, called in a process of its own per rank; what it tells reaches ``on_message``.
        size: ranks to start.
        port: of the job's store; 0 takes any free one.
        interface: that the store listens on, by name, address or network; the loopback interface when not given.
        restarts: how often the job was started again after a failure.
        preload: modules that ``main`` needs, loaded once for all ranks.
        on_message: called in this process with (rank, message).

    Raises:
        ChimeraError: what a rank raised; the cause rather than what followed from it.
        RunError: a rank died, or the port is taken. By the time it is raised every rank has ended.
    """
    warm_up(preload)
    address = LOOPBACK if interface is None else find_interface(interface).address
    with hold_store(address, port) as store:
        places = [Place(rank, size, rank, size, store, restarts=restarts) for rank in range(size)]
        return watch(main, places, on_message=on_message)
