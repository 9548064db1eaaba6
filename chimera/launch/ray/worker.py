"""What runs on the nodes of a Ray cluster: one rank in a process that Ray started, and what prepares a node for it.

A rank speaks by being asked: whoever watches the job calls ``hear`` again and again, so that a process that has died is
noticed by the call that fails. Nothing here calls Ray; ``chimera.launch.ray.job`` has it run these.
"""

import faulthandler
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from chimera.errors import RunError
from chimera.launch.parent import end_with_parent
from chimera.launch.place import Place, use_cores
from chimera.launch.verdict import Main, outcome_of

__all__ = ["LINE", "PROCESS", "Preparation", "RankWorker", "prepare_node"]

LINE: Final = "line"
"""Kind of a message that is a line which the rank, or a process of its own, has printed."""
PROCESS: Final = "process"
"""Kind of the first message: the process's number, and the file on its node that has all it prints."""
_THREADS: Final = "OMP_NUM_THREADS"
_LAST_LINES: Final = 10


class RankWorker:
    """One rank of a job.

    Args:
        environ: variables to set before its work begins. Given here and not to Ray, which writes an environment to its
            logs.
        folder: to work in; None stays where Ray began.
    """

    def __init__(self, environ: Mapping[str, str], folder: str | None) -> None:
        self._said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        _enter(environ, folder)
        if _THREADS in environ:
            # torch was loaded, and read the variable, before it was set.
            torch.set_num_threads(int(environ[_THREADS]))

    def start(self, main: Main, place: Place) -> None:
        """Begin the rank's work beside this thread, which goes on answering."""
        # Ray's daemon on this node has started this process; without it nobody would ever end it.
        end_with_parent(place.rank)
        self._said.put((PROCESS, (os.getpid(), self._forward_output())))
        threading.Thread(target=self._work, args=(main, place), name=f"rank {place.rank}", daemon=True).start()

    def hear(self, wait_s: float) -> list[tuple[str, Any]]:
        """Return what the rank has said since the last call, as kinds and contents; wait for the first of it."""
        heard = []
        try:
            heard.append(self._said.get(timeout=wait_s))
            while True:
                heard.append(self._said.get_nowait())
        except queue.Empty:
            return heard

    def leave(self) -> None:
        """End this process at once: for when the cluster that should do it is gone."""
        os._exit(1)

    def _work(self, main: Main, place: Place) -> None:
        use_cores(place)
        self._said.put(outcome_of(main, place, lambda message: self._said.put(("message", message))))

    def _forward_output(self) -> str:
        """Have each line that is printed from here on be heard, and written to Ray's log as before; return its path."""
        log = os.dup(2)
        path = str(Path(f"/proc/self/fd/{log}").resolve())
        # A crash has no time to be heard.
        faulthandler.enable(file=log)
        source, sink = os.pipe()
        for descriptor in (1, 2):
            os.dup2(sink, descriptor)
        os.close(sink)
        threading.Thread(target=self._forward, args=(source, log), name="output", daemon=True).start()
        return path

    def _forward(self, source: int, log: int) -> None:
        with os.fdopen(source, "rb") as lines:
            for line in lines:
                os.write(log, line)
                self._said.put((LINE, line.decode(errors="replace").rstrip()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What is done once on each node before ranks start there.

    Attributes:
        folder: in which commands run, and ranks later; None stays where Ray begins, in the copy of what was shipped.
        shared: a file that the launching host has written, which the node has to see.
        commands: programs and their arguments, run one after another.
        environ: variables of theirs.
    """

    folder: str | None
    shared: Path
    commands: Sequence[Sequence[str]]
    environ: Mapping[str, str]


def prepare_node(preparation: Preparation, address: str) -> list[str]:
    """Look whether a node sees what it has to, run the commands there, and return the lines that they printed.

    Args:
        preparation: what to do.
        address: of the node, for messages.

    Raises:
        RunError: it does not, or a command failed.
    """
    folder = preparation.folder
    if folder is not None and not Path(folder).is_dir():
        raise RunError(
            f"the node {address} has no folder {folder}, in which the command was given; share it with all nodes, or "
            "have Ray copy one by --working-dir"
        )
    _require_shared(preparation.shared, address)
    _enter(preparation.environ, folder)
    return [line for command in preparation.commands for line in _run(command, address)]


def _enter(environ: Mapping[str, str], folder: str | None) -> None:
    os.environ.update(environ)
    if folder is not None:
        os.chdir(folder)


def _require_shared(shared: Path, address: str) -> None:
    # Listing the folder makes a network file system look again; asking for a file that was missing may not.
    if not shared.parent.is_dir() or shared.name not in {entry.name for entry in shared.parent.iterdir()}:
        raise RunError(
            f"the node {address} does not see what this host writes to {shared.parent}; set --train.out to a folder "
            "that all nodes share"
        )


def _run(command: Sequence[str], address: str) -> list[str]:
    text = " ".join(command)
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
    except OSError as error:
        raise RunError(f"--before {text!r} cannot be started on {address}: {error.strerror or error}") from error
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode:
        said = "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
        raise RunError(f"--before {text!r} ended with code {done.returncode} on {address}{said and ', saying:'}{said}")
    return [*lines, f"{text!r} done in {time.monotonic() - began:.1f} s"]
