"""A training run on ranks of this host, or as one rank of a job that another launcher started.

Here the two meet that do not know each other: ``chimera.train``, which trains on one rank, and ``chimera.launch``,
which starts ranks. Prints nothing.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from chimera import launch
from chimera.errors import ConfigError, FormatError, NonFiniteError, RunError, UsageError
from chimera.launch import Place, Tell
from chimera.plan.ranks import RankGrid
from chimera.train.config import TrainConfig
from chimera.train.events import Event, Restarted, Started, TrainingResult
from chimera.train.folder import CHECKPOINTS, check_folder, checkpoint_path, checkpoint_steps
from chimera.train.layout import layout_of
from chimera.train.profile_result import ProfileResult, profile_folder
from chimera.train.tracking.command import Command
from chimera.train.tracking.extras import require_trackers
from chimera.train.tracking.record import end_record

__all__ = ["PRELOAD", "check_run", "run_joined", "run_local", "run_rank"]

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
    config: TrainConfig,
    *,
    resume: bool = False,
    restarts: int = 0,
    on_event: Callable[[Event], None] | None = None,
    on_failure: Callable[[RunError], None] | None = None,
) -> TrainingResult | ProfileResult:
    """Train or profile on ``config.world_size`` processes of this host and return what it came to.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in ``config.train.out``.
        restarts: how often to go on from the newest checkpoint after a rank died or stalled.
        on_event: called in this process with what the first rank reports.
        on_failure: called with each failure that the run survives.

    Raises:
        ChimeraError: whatever is wrong; every rank has ended by then.
    """
    # What can be known here is, before any process is started.
    check_run(config, resume=resume)
    require_trackers(config.metrics)
    layout_of(config)
    began = False

    def pass_on(rank: int, event: Any) -> None:
        nonlocal began
        began = began or isinstance(event, Started)
        if rank == 0 and on_event is not None:
            on_event(event)

    for attempt in count():
        try:
            return _attempt(config, resume=resume, restarts=attempt, on_message=pass_on)
        except RunError as error:
            # What never began would fail again, and so would numbers that grew without bound.
            if attempt == restarts or not began or isinstance(error, NonFiniteError):
                raise
            if on_failure is not None:
                on_failure(error)
    raise AssertionError("the loop has no end")


def _attempt(
    config: TrainConfig, *, resume: bool, restarts: int, on_message: Callable[[int, Any], None]
) -> TrainingResult | ProfileResult:
    """Start all ranks once; a failure is entered into the run's record, which a profile has none of."""
    command = Command.here()
    since_s = time.time() if restarts else command.started_s
    try:
        results: list[Any] = launch.run_local(
            partial(run_rank, config, resume=resume, command=command),
            config.world_size,
            port=config.runtime.port,
            interface=config.runtime.interface,
            restarts=restarts,
            preload=PRELOAD,
            on_message=on_message,
        )
    except BaseException as error:
        # The first rank may have been killed; and what it has written, if anything, need not be the cause.
        if not config.profile.steps:
            with suppress(OSError, FormatError):
                end_record(Path(config.train.out), error, since_s=since_s)
        raise
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
    try:
        RankGrid.of_world(place.size, tensor=grid.tensor, data=grid.data, pipeline=grid.pipeline)
    except UsageError as error:
        raise UsageError(f"{error}. To start as many: {place.size_option.format(grid.size)}") from None
    launch.use_cores(place)
    if place.ends_with_parent:
        launch.end_with_parent(place.rank)

    def tell(event: Any) -> None:
        if place.rank == 0 and on_event is not None and not isinstance(event, str):
            on_event(event)

    return run_rank(config, place, tell, resume=resume, command=Command.here())


def run_rank(
    config: TrainConfig, place: Place, tell: Tell, *, resume: bool = False, command: Command | None = None
) -> TrainingResult | ProfileResult | None:
    """Train or profile as the rank at ``place``, whoever started it; the first rank returns the result.

    A job that was started again after a failure goes on from the newest checkpoint of its run by itself.

    Args:
        config: the run.
        place: of this rank, one of ``config.world_size``.
        tell: called with what this rank is at, as texts; on the first rank also with every other event.
        resume: go on from the newest checkpoint in ``config.train.out``.
        command: what started the run, for its record; None for this process's own.

    Raises:
        ChimeraError: whatever is wrong.
    """
    # Ranks are forked with this loaded; the process that starts them does without.
    from chimera.train.loop import train

    device, runtime, began = _device(config, place), config.runtime, (command or Command.here()).again()
    tell("connecting to the other ranks")
    with launch.joined(place, timeout_s=runtime.timeout_s, interface=runtime.interface, port=runtime.port) as job:
        if config.profile.steps:
            return _profile_on_rank(config, job.group, device, place, tell)
        step = _newest_step(config, job.group) if job.restarts else 0

        def report(event: Event) -> None:
            if isinstance(event, Started):
                job.work_began()
            tell(event)

        if job.restarts and place.rank == 0:
            tell(Restarted(job.restarts, checkpoint_path(Path(config.train.out) / CHECKPOINTS, step) if step else None))
        result = train(
            config,
            job.group,
            device=device,
            resume=resume or step > 0,
            restarted=job.restarts > 0,
            command=began if job.restarts else command,
            report=report,
        )
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


def _newest_step(config: TrainConfig, group: "dist.ProcessGroup | None") -> int:
    """Return the step of the newest checkpoint that any rank sees, 0 for none."""
    step = torch.tensor(max(checkpoint_steps(Path(config.train.out) / CHECKPOINTS), default=0))
    if group is not None:
        dist.all_reduce(step, dist.ReduceOp.MAX, group=group)
    return int(step)


def _device(config: TrainConfig, place: Place) -> torch.device:
    wanted = config.runtime.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('[runtime] device = "cuda", but torch finds no CUDA device here; set it to "auto" or "cpu"')
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
