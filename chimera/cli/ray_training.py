"""A training run on a Ray cluster: what one asks of the cluster, and what its nodes have to see.

``chimera.launch.ray`` starts the ranks and knows no training. Ray is imported with this module, and reads its
environment then; whoever imports it has set that before. Prints nothing.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from chimera.cli.training import run_rank
from chimera.ir.files import making_folder
from chimera.launch.ray.attempt import RayJob, Shown
from chimera.launch.ray.job import attached, run_ray
from chimera.launch.ray.worker import Preparation
from chimera.train.config import TrainConfig
from chimera.train.events import TrainingResult
from chimera.train.profile_result import ProfileResult
from chimera.train.tracking.command import Command

__all__ = ["NOTES", "RayOptions", "run_on_ray"]

NOTES: Final = "ray.log"
"""File in the run's folder with what Ray had to say, if it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What a run asks of a cluster besides its configuration.

    Attributes:
        address: of the cluster's head.
        cpus_per_rank: cores that Ray counts for each rank.
        before: commands to run once on each node before ranks start.
        environ: variables of ranks and commands.
        working_dir: a folder that Ray copies to each node; None has nodes work in ``folder``.
        folder: that the command was given in.
        room_s: how long to wait until the cluster has room.
        max_restarts: how often to start again after a failure.
    """

    address: str
    cpus_per_rank: float
    before: Sequence[Sequence[str]]
    environ: Mapping[str, str]
    working_dir: Path | None
    folder: Path
    room_s: float
    max_restarts: int


def run_on_ray(
    config: TrainConfig, options: RayOptions, shown: Shown, *, resume: bool
) -> TrainingResult | ProfileResult:
    """Train on ``config.world_size`` ranks of a Ray cluster and return what it came to.

    Args:
        config: the run, whose folder has been checked.
        options: of the cluster and the job there.
        shown: told of what happens; messages are events, and only the first rank's matter.
        resume: go on from the newest checkpoint in ``config.train.out``.

    Raises:
        ChimeraError: whatever is wrong; every rank has ended by then.
    """
    out = Path(config.train.out)
    with (
        _shared_file(out) as shared,
        attached(options.address, working_dir=options.working_dir, notes=out / NOTES),
    ):
        job = RayJob(
            size=config.world_size,
            tensor=config.parallel.tensor,
            cpus=options.cpus_per_rank,
            gpu={"auto": None, "cpu": False, "cuda": True}[config.runtime.device],
            preparation=Preparation(
                folder=str(options.folder) if options.working_dir is None else None,
                shared=shared,
                commands=options.before,
                environ=options.environ,
            ),
            room_s=options.room_s,
            max_restarts=options.max_restarts,
            port=config.runtime.port,
            interface=config.runtime.interface,
        )
        results: list[Any] = run_ray(partial(run_rank, config, resume=resume, command=Command.here()), job, shown)
    result: TrainingResult | ProfileResult = results[0]
    return result


@contextmanager
def _shared_file(out: Path) -> Iterator[Path]:
    """Write a file into the run's folder that nodes are to see; it goes again, and a folder in which nothing came."""
    with making_folder(out):
        path = out.resolve() / f".seen-by-nodes-{secrets.token_hex(8)}"
        path.touch()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
