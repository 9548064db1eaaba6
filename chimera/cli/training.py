"""A training run on ranks of this host, or as one rank of a job that another launcher started.

Here the two meet that do not know each other: ``chimera.train``, which trains on one rank, and ``chimera.launch``,
which starts ranks. Prints nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from chimera import launch
from chimera.errors import ConfigError
from chimera.launch import Place, Tell
from chimera.plan.ranks import RankGrid
from chimera.train.config import TrainConfig
from chimera.train.events import Event, TrainingResult
from chimera.train.folder import check_folder
from chimera.train.layout import layout_of
from chimera.train.profile_result import ProfileResult, profile_folder

__all__ = ["PRELOAD", "check_run", "run_joined", "run_local"]

PRELOAD: Final = ("chimera.cli.training", "chimera.train.loop", "torch._dynamo")
"""What ranks need loaded; ``chimera.launch.warm_up(PRELOAD)`` loads it while the caller does something else.

The last takes a second, and torch loads it at the first step of any optimizer.
"""


def check_run(config: TrainConfig, *, resume: bool) -> None:
    """See that the run may begin or go on in its folder; of a profile, which has a folder of its own, that it is new.

    Raises:
        ConfigError, CheckpointError: as ``check_folder`` does.
    """
    if not config.profile.steps:
        check_folder(config, resume=resume)
    elif resume:
        raise ConfigError(
            f"[profile] steps = {config.profile.steps} makes the run a profile, of which nothing is left to resume; "
            "leave out --resume, or set profile.steps to 0"
        )


def run_local(
    config: TrainConfig, *, resume: bool = False, on_event: Callable[[Event], None] | None = None
) -> TrainingResult | ProfileResult:
    """Train or profile on ``config.world_size`` processes of this host and return what it came to.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in ``config.train.out``.
        on_event: called in this process with what the first rank reports.

    Raises:
        ChimeraError: whatever is wrong; every rank has ended by then.
    """
    # What can be known here is, before any process is started.
    check_run(config, resume=resume)
    layout_of(config)

    def pass_on(rank: int, event: Any) -> None:
        if rank == 0 and on_event is not None:
            on_event(event)

    results: list[Any] = launch.run_local(
        partial(_train_on_rank, config, resume),
        config.world_size,
        port=config.runtime.port,
        preload=PRELOAD,
        on_message=pass_on,
    )
    result: TrainingResult | ProfileResult = results[0]
    return result


def run_joined(
    config: TrainConfig, place: Place, *, resume: bool = False, on_event: Callable[[Event], None] | None = None
) -> TrainingResult | ProfileResult | None:
    """Train or profile as the rank at ``place`` of a job that is there already; the first rank gets the result.

    Raises:
        UsageError: the job is not of ``config.world_size`` ranks; the nearest legal sizes are named.
        ChimeraError: as ``run_local``.
    """
    grid = config.grid
    RankGrid.of_world(place.size, tensor=grid.tensor, data=grid.data, pipeline=grid.pipeline)
    launch.use_cores(place)

    def tell(event: Any) -> None:
        if place.rank == 0 and on_event is not None and not isinstance(event, str):
            on_event(event)

    return _train_on_rank(config, resume, place, tell)


def _train_on_rank(
    config: TrainConfig,
    resume: bool,  # noqa: FBT001
    place: Place,
    tell: Tell,
) -> TrainingResult | ProfileResult | None:
    # Ranks are forked with this loaded; the process that starts them does without.
    from chimera.train.loop import train

    device = _device(config, place)
    tell("connecting to the other ranks")
    with launch.connected(place, timeout_s=config.runtime.timeout_s) as group:
        if config.profile.steps:
            return _profile_on_rank(config, group, device, place, tell)
        result = train(config, group, device=device, resume=resume, report=tell)
    return result if place.rank == 0 else None


def _profile_on_rank(
    config: TrainConfig, group: "dist.ProcessGroup | None", device: torch.device, place: Place, tell: Tell
) -> ProfileResult | None:
    """Profile, and write the files on the first rank: whoever started the ranks needs to know nothing of profiles."""
    from chimera.cli.profile_report import check_profile_folder, write_profile
    from chimera.train.profiling import profile

    if place.rank == 0:
        check_profile_folder(profile_folder(config, device))
    found = profile(config, group, device=device, report=tell)
    if place.rank:
        return None
    tell("drawing the timeline")
    write_profile(found)
    return found


def _device(config: TrainConfig, place: Place) -> torch.device:
    wanted = config.runtime.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('[runtime] device = "cuda", but torch finds no CUDA device here; set it to "auto" or "cpu"')
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
