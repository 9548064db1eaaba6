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
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final

from chimera.errors import ChimeraError, RunError, StalledError
from chimera.launch.place import Place, use_cores

__all__ = ["Main", "Tell", "start_method", "watch"]

Tell = Callable[[Any], None]
"""Sends a picklable message to the parent. A text says what the rank is at, and is kept for a report of its death."""
Main = Callable[[Place, Tell], Any]

_LAST_WORDS_S: Final = 3.5
"""How long ranks may go on after the first failure: a survivor gathers for 1.5 s what every rank was doing."""


def start_method() -> ForkServerContext:
    """Return the context that processes are started in."""
    return get_context("forkserver")


@dataclass(slots=True)
class _Rank:
    """What the parent knows of one rank."""

    number: int
    process: ForkServerProcess
    connection: Connection
    activity: str = "starting"
    result: Any = None
    finished: bool = False
    error: BaseException | None = None


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
            self.ranks.append(_Rank(place.rank, process, here))

    @property
    def open(self) -> list[_Rank]:
        """Ranks that may still say something."""
        return [rank for rank in self.ranks if not rank.connection.closed]

    @property
    def failed(self) -> bool:
        return any(rank.connection.closed and not rank.finished for rank in self.ranks) or any(
            rank.error is not None for rank in self.ranks
        )

    @property
    def has_report(self) -> bool:
        """Whether a rank that waited in vain has told what all were doing; the others say one line."""
        return any(_is_report(rank.error) for rank in self.ranks)

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
        if kind == "result":
            rank.result, rank.finished = content, True
        elif kind == "error":
            rank.error = content
        elif isinstance(content, str):
            rank.activity = content
        elif self.on_message is not None:
            self.on_message(rank.number, content)

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
            raise _cause(job.ranks)
        for rank in job.ranks:
            rank.process.join()
        return [rank.result for rank in job.ranks]
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


def _cause(ranks: Sequence[_Rank]) -> BaseException:
    """Return the error to raise: a death before what its peers noticed, an error of its own before a stall."""
    errors = [rank.error for rank in ranks if rank.error is not None]
    # Of several ranks that waited in vain, one has gathered what all were doing; its report has the most lines.
    stalled = max((e for e in errors if isinstance(e, StalledError)), key=lambda e: str(e).count("\n"), default=None)
    said = [] if stalled is None else [str(stalled)]
    if stalled is None or not _is_report(stalled):
        said += ["what every rank was doing:", *(f"  rank {rank.number}: {rank.activity}" for rank in ranks)]
    dead = [r for r in ranks if r.connection.closed and not r.finished and r.error is None]
    if dead:
        deaths = [f"rank {rank.number} {_how_it_ended(rank.process.exitcode)}" for rank in dead]
        return RunError("\n".join([*deaths, *said]))
    own = next((error for error in errors if not isinstance(error, StalledError)), None)
    return StalledError("\n".join(said)) if own is None else own


def _is_report(error: BaseException | None) -> bool:
    """Return whether an error is a rank's report of what all were doing, and not its one line of having waited."""
    return isinstance(error, StalledError) and "\n" in str(error)


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

    try:
        outcome = ("result", main(place, tell))
    except ChimeraError as error:
        outcome = ("error", error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
        outcome = ("error", _sendable(error, f"on rank {place.rank}:\n{traceback.format_exc()}"))
    with contextlib.suppress(BrokenPipeError):
        parent.send(outcome)
    parent.close()


def _sendable(error: Exception, note: str) -> Exception:
    """Return ``error`` with a note, or its text where its class may not survive the way to another process."""
    if type(error).__module__ != "builtins":
        error = RuntimeError(f"{type(error).__qualname__}: {error}")
    error.add_note(note)
    return error


def _end_with_parent() -> None:
    """Wait until the process that asked for this one has gone, then go too, without a word."""
    parent = parent_process()
    assert parent is not None, "a rank has a parent"
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
