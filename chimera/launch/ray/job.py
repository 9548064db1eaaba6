"""A job on a Ray cluster: its nodes prepared, its ranks started, and started again when one of them is lost.

This process is Ray's driver. It holds the job's store, as the parent of local ranks does, and computes nothing. What a
rank does is a function that is given, and where a restarted one goes on is that function's business.
"""

import io
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
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

_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
_LEFT_OUT: Final = ("**/.git", "**/runs", "**/.venv", "**/venv", "**/__pycache__", "**/.mypy_cache", "**/.ruff_cache")
"""What is never copied to nodes: history, results and caches."""


@contextmanager
def attached(address: str, *, working_dir: Path | None, notes: Path) -> Iterator[None]:
    """Be a driver of the cluster at ``address``, with our code, and ``working_dir`` if given, shipped to its nodes.

    Args:
        address: of its head, as host:port.
        working_dir: a folder to copy.
        notes: file that gets what Ray prints meanwhile: the last lines of a lost daemon's log, for example.

    Raises:
        RunError: the cluster cannot be joined from here, for the reason that Ray gives.
    """
    environment: dict[str, Any] = {"py_modules": [str(Path(chimera.__file__).parent)], "excludes": list(_LEFT_OUT)}
    if working_dir is not None:
        environment["working_dir"] = str(working_dir)
    try:
        ray.init(address=address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=False)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(
            f"the Ray cluster at {address} cannot be joined: {error}. This host has to be one of its nodes, with Ray "
            f"{ray.__version__} as on the others; if it asks for a token, set RAY_AUTH_MODE to token and "
            "RAY_AUTH_TOKEN_PATH to the file that has it"
        ) from error
    # Ray prints notes of its daemons to whatever is stdout, to its last moment, and has no option against it.
    with redirect_stdout(_Notes(notes)):
        try:
            yield
        finally:
            ray.shutdown()


class _Notes(io.TextIOBase):
    """A file that is there once something has been written to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        with self._path.open("a", encoding="utf-8") as file:
            return file.write(_COLOUR.sub("", text))


def run_ray(main: Main, job: RayJob, shown: Shown) -> list[Any]:
    """Run ``main(place, tell)`` on the ranks of ``job`` and return what each returned, in rank order.

    Args:
        main: a picklable function, of a module that nodes can import.
        job: how many there are, and what they need of the attached cluster.
        shown: told of everything that happens.

    Raises:
        ChimeraError: what a rank raised, or the cause of the last failure. No rank runs any more by then.
    """
    here = get_node_ip_address()
    address = here if job.interface is None else find_interface(job.interface).address
    prepared: set[str] = set()
    causes: list[str] = []
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
                    raise _after(error, causes) from error
                causes.append(str(error).partition("\n")[0])
                shown.restart(error, restarts + 1)
    raise AssertionError("the loop is endless")


def _may_pass(error: Exception) -> bool:
    """Return whether starting again may help: not where the same steps would fail in the same way."""
    if isinstance(error, ChimeraError):
        return isinstance(error, RunError) and not isinstance(error, NonFiniteError | LostError)
    return isinstance(error, RuntimeError | OSError)


def _after(error: Exception, causes: Sequence[str]) -> Exception:
    """Say in a failure what failed before it."""
    if causes and isinstance(error, RunError):
        earlier = [f"  {number}. {cause}" for number, cause in enumerate(causes, 1)]
        return type(error)("\n".join([str(error), "all ranks had been started again, after", *earlier]))
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
