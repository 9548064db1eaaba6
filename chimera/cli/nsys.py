"""Running a profile under NVIDIA's nsys: the same command again, as a list of arguments, below ``nsys profile``.

Where a launcher starts the processes of a node, each of them puts itself under nsys; where we start them, one nsys sees
them all. Nothing here is passed through a shell.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from chimera.errors import UsageError
from chimera.launch import Place

__all__ = ["is_under_nsys", "nsys_command", "run_under_nsys"]

_MARK: Final = "CHIMERA_UNDER_NSYS"
_NODE: Final = "CHIMERA_NODE"


def is_under_nsys(environ: Mapping[str, str]) -> bool:
    """Whether this process was put under nsys by ``run_under_nsys``."""
    return environ.get(_MARK) == "1"


def nsys_command(nsys: str, folder: Path, place: Place | None, words: Sequence[str]) -> list[str]:
    """Return the arguments that run ``chimera`` with ``words`` under ``nsys``, which itself looks up %q{VARIABLE}.

    Args:
        nsys: path of the program.
        folder: of the results, whose name those of nsys begin with.
        place: of this process; None where it is to start the ranks itself.
        words: of the command line.
    """
    name = f"{folder / folder.name}_node%q{{{_NODE}}}"
    if place is not None and place.local_size > 1:
        name += "_rank%q{RANK}"
    return [
        nsys,
        "profile",
        *("-t", "cuda,nvtx"),
        *("-o", name),
        *("--export", "sqlite"),
        *("--force-overwrite", "true"),
        "--trace-fork-before-exec=true",
        sys.executable,
        "-m",
        "chimera",
        *words,
    ]


def run_under_nsys(folder: Path, place: Place | None, words: Sequence[str], nodes: Sequence[int] | None) -> None:
    """Become nsys with this very command below it, on the chosen nodes; on others return.

    Args:
        folder: of the results.
        place: of this process; None where it is to start the ranks itself, on node 0.
        words: of the command line.
        nodes: that are watched; all without.

    Raises:
        UsageError: this machine has no nsys.
    """
    node = 0 if place is None else place.rank // place.local_size
    if nodes is not None and node not in nodes:
        return
    nsys = shutil.which("nsys")
    if nsys is None:
        raise UsageError(
            "--nsys: there is no nsys on this machine's PATH; install NVIDIA Nsight Systems or load its module, or "
            "leave --nsys out: the timeline, its figures and tables are made without it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    command = nsys_command(nsys, folder, place, words)
    os.execve(nsys, command, {**os.environ, _MARK: "1", _NODE: str(node)})  # noqa: S606 - no shell is wanted
