"""Where a rank stands in its job, as its launcher says it.

Torch's variables come first: torchrun may itself be started by SLURM. This module reads variables; it opens no
connection and does not ask what the ranks do.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from chimera.errors import UsageError
from chimera.launch.interfaces import is_local_name
from chimera.launch.place import Place, whole_number
from chimera.launch.slurm_step import place_in_step
from chimera.launch.store import Endpoint

__all__ = ["place_from_environment"]

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def place_from_environment(environ: Mapping[str, str], *, folder: Path = Path()) -> Place | None:
    """Return the place that torch's or SLURM's variables give, or None when no launcher started this process.

    Args:
        environ: the variables of this process.
        folder: that all hosts share; where no address is given, the first rank tells the others there where it is.

    Raises:
        UsageError: a variable is missing beside the others, or one is not what it has to be.
    """
    if {"RANK", "WORLD_SIZE"} & environ.keys():
        return _place_by_torch(environ)
    return place_in_step(environ, folder=folder, on_terminal=_on_terminal())


def _place_by_torch(environ: Mapping[str, str]) -> Place:
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        given = " and ".join(name for name in _NEEDED if environ.get(name))
        raise UsageError(
            f"the environment sets {given} but not {', '.join(missing)}, so this process is part of a job that it "
            "cannot find; start it by torchrun, or unset RANK and WORLD_SIZE to have the ranks started here"
        )
    rank, size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank} with WORLD_SIZE {size}; needed: a rank in 0…{size - 1}")
    store = Endpoint(environ["MASTER_ADDR"], whole_number(environ, "MASTER_PORT"))
    if not 0 < store.port < 65536:
        raise UsageError(f"MASTER_PORT is {store.port}; needed: a port in 1…65535, the same on every rank")
    elastic = "TORCHELASTIC_RESTART_COUNT" in environ
    # The agents of torchrun keep one store for all attempts.
    kept = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    local_size = whole_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    return Place(
        rank,
        size,
        local_rank=whole_number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank,
        local_size=local_size or size,
        store=store,
        holds_store=rank == 0 and not kept,
        spans_hosts=local_size != size and not is_local_name(store.host),
        restarts=whole_number(environ, "TORCHELASTIC_RESTART_COUNT") if elastic else 0,
        store_outlives=kept,
        size_option="torchrun --nproc-per-node={} on one host, or a part of it on each" if elastic else "WORLD_SIZE={}",
        ends_with_parent=elastic,
    )


def _on_terminal() -> bool:
    with suppress(OSError):
        return os.isatty(0)
    return False
