"""A rank's place in a step of SLURM, from the variables that ``srun`` gives each task.

Only a task of a step of several is a rank. A shell in an allocation (salloc, ``srun --pty``) and a batch script have
many of the same variables, but nobody started the others beside them. Knows SLURM's node lists and task counts; runs
nothing.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from chimera.errors import UsageError
from chimera.ir.files import shown
from chimera.launch.place import Place, whole_number
from chimera.launch.store import StoreFile

__all__ = ["allocated_nodes", "parse_node_list", "parse_tasks_per_node", "place_in_step"]

_Value = TypeVar("_Value")
_MAX_NODES: Final = 65_536
"""As many as SLURM can have; what asks for more is no node list."""
_PART: Final = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASKS: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def place_in_step(environ: Mapping[str, str], *, folder: Path, on_terminal: bool) -> Place | None:
    """Return the place of a task of a step, or None where this process is no task among several.

    Args:
        environ: the variables of this process.
        folder: shared by all nodes; the first rank tells the others there where they meet.
        on_terminal: whether this process reads a terminal, as the shell of ``srun --pty`` does.

    Raises:
        UsageError: a variable is missing or cannot be read, or they contradict each other.
    """
    if not environ.get("SLURM_STEP_ID") or (environ.get("SLURM_PTY_PORT") and on_terminal):
        return None
    size = whole_number(environ, _given(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if size == 1:
        return None
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise UsageError(
            f"this is a heterogeneous job of {environ['SLURM_HET_SIZE']} components, each of which counts its tasks "
            "from 0; ask for one component, as in: srun --het-group=0"
        )
    rank, node, local_rank = (
        whole_number(environ, _given(environ, name)) for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    )
    counted = _given(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    listed = _given(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    tasks = _read(environ, counted, parse_tasks_per_node)
    nodes = _read(environ, listed, parse_node_list)
    if len(tasks) != len(nodes) or sum(tasks) != size or not (node < len(nodes) and local_rank < tasks[node]):
        raise UsageError(
            f"SLURM's variables contradict each other: {size} tasks, {counted} {environ[counted]!r}, {listed} "
            f"{environ[listed]!r}, task {local_rank} of node {node}; start the step by srun, which sets them all"
        )
    job, step, restarts = (environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return Place(
        rank,
        size,
        local_rank,
        local_size=tasks[node],
        store=StoreFile(
            folder / f".store-{job}.{step}.{restarts}.json",
            # srun's own host: every task talks to it already.
            towards=environ.get("SLURM_LAUNCH_NODE_IPADDR") or environ[_given(environ, "SLURM_SRUN_COMM_HOST")],
        ),
        holds_store=rank == 0,
        spans_hosts=len(nodes) > 1,
        restarts=whole_number(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0,
        host=nodes[node],
        cores=_cores(environ, tasks[node]),
        size_option="srun --ntasks={}",
        ends_with_parent=True,
    )


def allocated_nodes(environ: Mapping[str, str]) -> int:
    """Return how many nodes of SLURM the caller has, 0 outside an allocation or where it is not said."""
    text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "0"
    return int(text) if environ.get("SLURM_JOB_ID") and text.isdecimal() else 0


def parse_node_list(text: str) -> list[str]:
    """Return the nodes of SLURM's short form, in its order.

    >>> parse_node_list("n[08-10,12],gpu1,r[1-2]c[0-1]")
    ['n08', 'n09', 'n10', 'n12', 'gpu1', 'r1c0', 'r1c1', 'r2c0', 'r2c1']

    Raises:
        ValueError: it is no such form; the message says where.
    """
    nodes: list[str] = []
    position = 0
    while position < len(text) or not nodes:
        parts: list[list[str]] = []
        while match := _PART.match(text, position):
            parts.append(_numbers(match[0]) if match[0].startswith("[") else [match[0]])
            position = match.end()
        if not parts or text[position : position + 1] not in {"", ","} or position == len(text) - 1:
            raise ValueError(f"it cannot be read at character {position + 1}")
        if len(nodes) + math.prod(map(len, parts)) > _MAX_NODES:
            raise ValueError(f"it has more than {_MAX_NODES:,} nodes")
        nodes += map("".join, itertools.product(*parts))
        position += 1
    return nodes


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node from SLURM's short form.

    >>> parse_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Raises:
        ValueError: it is no such form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no number of tasks, such as 2 or 2(x3)")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MAX_NODES:
            raise ValueError(f"it has more than {_MAX_NODES:,} nodes")
        counts += [int(match[1])] * repeats
    return counts


def _numbers(brackets: str) -> list[str]:
    """Return what stands for a pair of brackets; a number with leading zeros gives the width of its range."""
    numbers: list[str] = []
    for part in brackets[1:-1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} in {brackets} is no range, such as 1-3 or 08-11")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or len(numbers) + last - first >= _MAX_NODES:
            raise ValueError(f"the range {part} in {brackets} has {'no' if last < first else 'far too many'} nodes")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _given(environ: Mapping[str, str], *names: str) -> str:
    """Return the first of these names that is set; the first is the one to miss."""
    for name in names:
        if environ.get(name):
            return name
    raise UsageError(
        f"this is a task of SLURM's step {environ.get('SLURM_JOB_ID', '?')}.{environ['SLURM_STEP_ID']}, but "
        f"{names[0]} is not set; start the ranks by srun, which sets it and hands it on (see --export), or unset "
        "SLURM_STEP_ID to have them started here"
    )


def _read(environ: Mapping[str, str], name: str, parse: Callable[[str], list[_Value]]) -> list[_Value]:
    try:
        return parse(environ[name])
    except ValueError as error:
        raise UsageError(
            f"{name} is {shown(environ[name])}, which cannot be parsed: {error}; start the ranks by srun, which sets "
            "it, or unset SLURM_STEP_ID to have them started here"
        ) from None


def _cores(environ: Mapping[str, str], local_size: int) -> int | None:
    """Return a task's cores where SLURM says it."""
    if "SLURM_CPUS_PER_TASK" in environ:
        return whole_number(environ, "SLURM_CPUS_PER_TASK")
    if "SLURM_CPUS_ON_NODE" in environ:
        return max(1, whole_number(environ, "SLURM_CPUS_ON_NODE") // local_size)
    return None
