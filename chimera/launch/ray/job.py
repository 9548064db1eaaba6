"""A job on a Ray cluster: its nodes prepared, its ranks started, and started again when one of them is lost.

This process is Ray's driver. It holds the job's store, as the parent of local ranks does, and computes nothing. What a
rank does is a function that is given, and where a restarted one goes on is that function's business.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import chimera
from chimera.errors import ChimeraError, NonFiniteError, RunError
from chimera.launch.interfaces import find_interface
from chimera.launch.ray.attempt import Attempt, LostError, RayJob, Shown
from chimera.launch.ray.placement import Seat
from chimera.launch.ray.worker import prepare_node
from chimera.launch.store import hold_store
from chimera.launch.verdict import Main

__all__ = ["attached", "run_ray"]

_LEFT_OUT: Final = ("**/.git", "**/runs", "**/.venv", "**/venv", "**/__pycache__", "**/.mypy_cache", "**/.ruff_cache")
"""What is never copied to nodes: history, results and caches."""


@contextmanager
def attached(address: str, *, working_dir: Path | None) -> Iterator[None]:
    """Be a driver of the cluster at ``address``, with our code, and ``working_dir`` if given, shipped to its nodes.

    Raises:
        RunError: the cluster cannot be joined from here, for the reason that Ray gives.
    """
    environment: dict[str, Any] = {"py_modules": [str(Path(chimera.__file__).parent)], "excludes": list(_LEFT_OUT)}
    if working_dir is not None:
        environment["working_dir"] = str(working_dir)
    try:
        ray.init(address=address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=False)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(f"the Ray cluster at {address} cannot be joined from this host: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def run_ray(main: Main, job: RayJob, shown: Shown) -> list[Any]:
    """Run ``main(place, tell)`` on ``job.size`` ranks of the attached cluster; return what each returned, in rank order.

    Args:
        main: a picklable function, of a module that nodes can import.
        job: what it needs.
        shown: told of everything that happens.

    Raises:
        ChimeraError: what a rank raised, or the cause of the last failure. No rank runs any more by then.
    """
    here = get_node_ip_address()
    address = here if job.interface is None else find_interface(job.interface).address
    prepared: set[str] = set()
    with hold_store(address, job.port) as store:
        for restarts in itertools.count():
            try:
                with Attempt(job, shown) as attempt:
                    shown.placed(attempt.seats)
                    _prepare(job, attempt.seats, prepared, shown)
                    attempt.start(main, store, restarts)
                    return attempt.watch()
            except Exception as error:
                if restarts == job.max_restarts or not _may_pass(error):
                    raise _after(error, restarts) from error
                shown.restart(error, restarts + 1)
    raise AssertionError("the loop is endless")


def _may_pass(error: Exception) -> bool:
    """Return whether starting again may help: not where the same steps would fail in the same way."""
    if isinstance(error, ChimeraError):
        return isinstance(error, RunError) and not isinstance(error, NonFiniteError | LostError)
    return isinstance(error, RuntimeError | OSError)


def _after(error: Exception, restarts: int) -> Exception:
    """Say in a failure that it was not the first."""
    if restarts and isinstance(error, RunError):
        times = "once" if restarts == 1 else f"{restarts} times"
        return type(error)(f"{error}\nall ranks had been started again {times} before that")
    return error


def _prepare(job: RayJob, seats: Sequence[Seat], prepared: set[str], shown: Shown) -> None:
    """Prepare, all at once, the nodes that ranks are to sit on and that were not prepared before."""
    nodes = [node for node in dict.fromkeys(seat.node for seat in seats) if node.name not in prepared]
    run = ray.remote(num_cpus=0, max_retries=0)(prepare_node)
    tasks = [
        run.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.name, soft=False)).remote(
            job.preparation, node.address
        )
        for node in nodes
    ]
    try:
        for node, lines in zip(nodes, ray.get(tasks), strict=True):
            for line in lines:
                shown.line(f"node {node.address}", line)
    except RayTaskError as error:
        # Trying again would change nothing.
        raise LostError(str(error.cause)) from error
    except RayError as error:
        raise RunError(f"a node could not be prepared: {error}") from error
    prepared.update(node.name for node in nodes)
