"""Processes of one job: started together, heard out, ended together.

Each is forked from a server process that has loaded the modules and has no threads of its own, and ends with its
parent. When one fails, the others have a moment to say why before they are ended; the error that is raised then is the
cause, not what followed from it. Nothing here knows torch or what the processes do.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final

from chimera.launch.place import Place, use_cores
from chimera.launch.verdict import Main, RankState, Tell, cause_of, is_report, outcome_of

__all__ = ["Main", "Tell", "start_method", "watch"]

_LAST_WORDS_S: Final = 3.5
"""How long ranks may go on after the first failure: a survivor gathers for 1.5 s what every rank was doing."""


def start_method() -> ForkServerContext:
    """Return the context that processes are started in."""
    return get_context("forkserver")


@dataclass(slots=True)
class _Rank:
    """One rank's process, and what the parent knows of it."""

    state: RankState
    process: ForkServerProcess
    connection: Connection


@dataclass(slots=True)
class _Job:
    ranks: list[_Rank] = field(default_factory=list)
    on_message: Callable[[int, Any], None] | None = None

    def start(self, main: Main, places: Sequence[Place]) -> None:
        context = start_method()
        for place in places:
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(main, place, dict(os.environ), there),
                name=f"rank {place.rank}",
                # It may have workers of its own, which daemons may not; it ends with its parent all the same.
                daemon=False,
            )
            process.start()
            there.close()
            self.ranks.append(_Rank(RankState(place.rank), process, here))

    @property
    def open(self) -> list[_Rank]:
        """Ranks that may still say something."""
        return [rank for rank in self.ranks if not rank.connection.closed]

    @property
    def failed(self) -> bool:
        return any(rank.state.failed or (rank.connection.closed and not rank.state.finished) for rank in self.ranks)

    @property
    def has_report(self) -> bool:
        """Whether a rank that waited in vain has told what all were doing; the others say one line."""
        return any(is_report(rank.state.error) for rank in self.ranks)

    def listen(self, timeout_s: float | None) -> None:
        """Hear every rank that has something to say, waiting up to ``timeout_s`` for the first."""
        by_connection = {rank.connection: rank for rank in self.open}
        for ready in wait(list(by_connection), timeout_s):
            self._hear(by_connection[ready])  # type: ignore[index]

    def _hear(self, rank: _Rank) -> None:
        try:
            kind, content = rank.connection.recv()
        except (EOFError, OSError):
            rank.connection.close()
            return
        message = rank.state.hear(kind, content)
        if message is not None and self.on_message is not None:
            self.on_message(rank.state.rank, message)

    def end(self) -> None:
        """End every process that still runs, a stopped one too; files are never half-written, so it may be sudden."""
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.connection.close()


def watch(main: Main, places: Sequence[Place], *, on_message: Callable[[int, Any], None] | None) -> list[Any]:
    """Run ``main`` at every place, one process each; see ``chimera.launch.local.run_local``."""
    job = _Job(on_message=on_message)
    try:
        job.start(main, places)
        while job.open and not job.failed:
            job.listen(None)
        if job.failed:
            _hear_out(job)
            raise cause_of([rank.state for rank in job.ranks])
        for rank in job.ranks:
            rank.process.join()
        return [rank.state.result for rank in job.ranks]
    finally:
        job.end()


def _hear_out(job: _Job) -> None:
    """Listen until one rank has told what all were doing, every rank has ended, or time is up."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while job.open and not job.has_report and (left := deadline - time.monotonic()) > 0:
        job.listen(left)
    for rank in job.ranks:
        if rank.connection.closed:
            # It has said its last, so its exit code is near.
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if not rank.state.finished and rank.state.error is None:
                rank.state.death = _how_it_ended(rank.process.exitcode)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its connection and goes on running"
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system does this when memory runs out)" if -code == signal.SIGKILL else ""
        return f"was ended by {name}{hint}"
    return f"ended with exit code {code} before it was done"


def _run_rank(main: Main, place: Place, environ: Mapping[str, str], parent: Connection) -> None:
    """Be one rank: the first thing a new process does."""
    # Control-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="chimera-parent", daemon=True).start()
    # The server that forked this process was started earlier, perhaps in another environment.
    os.environ.clear()
    os.environ.update(environ)
    use_cores(place)

    def tell(message: Any) -> None:
        parent.send(("message", message))

    outcome = outcome_of(main, place, tell)
    with contextlib.suppress(BrokenPipeError):
        parent.send(outcome)
    parent.close()


def _end_with_parent() -> None:
    """Wait until the process that asked for this one has gone, then go too, without a word."""
    parent = parent_process()
    assert parent is not None, "a rank has a parent"
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
