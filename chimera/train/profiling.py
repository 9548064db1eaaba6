"""Profiling a run: a few steps recorded on every rank, the costs that they tell, and the step that these predict.

Nothing is learned that is kept: there is no checkpoint, no metric, and no folder but the profile's own. With ablation
the same steps are made again without the volume of messages or reductions. All ranks call this; files and pages are
made of the result elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from chimera.data import build_data
from chimera.ir.costs_file import read_costs
from chimera.runtime.ablation import Ablation
from chimera.runtime.runnable import channels_of
from chimera.simulate import simulate
from chimera.train.config import TrainConfig
from chimera.train.events import Report, report_to_nobody
from chimera.train.layout import Layout, layout_of
from chimera.train.link_times import time_channels, time_reductions
from chimera.train.observers import KeptBytes, named_ranges, ranged
from chimera.train.profile_costs import Recorded, measured_costs, stage_bytes, with_links, with_memory
from chimera.train.profile_result import ProfileResult, Recording, profile_folder
from chimera.train.stepping import Steps, TrainingSteps, VirtualSteps
from chimera.train.tools import require_tools, snapshot_memory, trace_with_torch

__all__ = ["profile"]

_LEFT_OUT: Final[Mapping[Ablation, tuple[Ablation, ...]]] = {
    "none": (),
    "p2p": ("p2p",),
    "allreduce": ("allreduce",),
    "all": ("p2p", "allreduce", "all"),
}
"""The further runs that each choice of ``profile.ablate`` asks for."""
_FURTHER_STEPS: Final = 3
"""Steps beside those that are recorded: what forwards keep, torch's profiler, the allocator's history."""


def profile(
    config: TrainConfig,
    group: "dist.ProcessGroup | None",
    *,
    device: torch.device,
    report: Report | None = None,
) -> ProfileResult:
    """Profile the steps of a run on this rank, together with the others of ``group``.

    Args:
        config: the same on every rank, with ``profile.steps`` above 0.
        group: the ranks of the run; None for one rank on its own.
        device: of this rank.
        report: called with what this rank is at.

    Returns:
        The same on every rank.

    Raises:
        ChimeraError: see ``chimera.errors``.
    """
    options = config.profile
    assert options.steps, "a run without recorded steps is no profile"
    layout = layout_of(config)
    require_tools(options, device)
    making = _Making(config, layout, group, device, report or report_to_nobody)
    found = _recorded(making, device)
    given = making.costs
    measured = measured_costs(found, config, layout, given)
    predicting = measured if given is None else with_links(given, measured)
    return ProfileResult(
        name=profile_folder(config, device).name,
        out=profile_folder(config, device),
        device=_title(config, device),
        virtual=options.virtual,
        schedule=found.schedule,
        runs=1 if options.virtual else config.train.accumulation_runs,
        timelines=tuple(
            tuple(with_memory(timeline, config, layout, measured) for timeline in step) for step in found.timelines
        ),
        step_s=found.step_s,
        costs=measured,
        predicted_from=options.costs,
        predicted=with_memory(simulate(found.schedule, predicting), config, layout, measured),
        channels=found.channels,
        ablated={ablate: making.timed(ablate) for ablate in _LEFT_OUT[options.ablate]},
        recording=found.recording,
    )


class _Making:
    """Makes the steps that a profile asks for."""

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        group: "dist.ProcessGroup | None",
        device: torch.device,
        report: Report,
    ) -> None:
        self.config = config
        self.layout = layout
        self.report = report
        self.costs = None if config.profile.costs is None else read_costs(config.profile.costs)
        self._steps: Callable[..., Steps]
        if config.profile.virtual:
            assert self.costs is not None, "the options ask for costs"
            self._steps = partial(
                VirtualSteps,
                layout,
                self.costs,
                group,
                device=device,
                bucket_bytes=config.bucket_bytes,
                shard_optimizer=config.parallel.shard_optimizer,
                timeout_s=config.runtime.timeout_s,
            )
        else:
            report("reading the corpus")
            number = config.profile.warmup_steps + config.profile.steps + _FURTHER_STEPS
            self._steps = partial(
                TrainingSteps,
                config,
                layout,
                build_data(config.data),
                group,
                device=device,
                number=number,
            )

    @property
    def gradient_bytes(self) -> Sequence[float]:
        """The gradients that each stage reduces."""
        if self.config.profile.virtual and self.costs is not None:
            return self.costs.gradient_bytes or [0.0] * self.costs.num_stages
        return stage_bytes(self.config, self.layout)["gradient_bytes"]

    def begun(self, ablate: Ablation) -> Steps:
        """Return steps, those of the warm-up made."""
        self.report("building the pipeline")
        steps = self._steps(ablate=ablate)
        self.report("warming up" if ablate == "none" else f"warming up without {ablate}")
        for _ in range(self.config.profile.warmup_steps):
            steps.make()
        return steps

    def timed(self, ablate: Ablation) -> tuple[float, ...]:
        """Return the seconds of as many steps as are recorded, with the volume of ``ablate`` left out."""
        steps = self.begun(ablate)
        try:
            self.report(f"timing steps without {ablate}")
            return _of_first_rank(steps, [steps.make() for _ in range(self.config.profile.steps)])
        finally:
            steps.close()


def _recorded(making: _Making, device: torch.device) -> Recorded:
    options = making.config.profile
    steps = making.begun("none")
    pipe = steps.pipe
    folder = profile_folder(making.config, device)
    try:
        kept = KeptBytes(parameter for _, parameter in pipe.named_parameters())
        if not options.virtual:
            making.report("counting what forwards keep")
            pipe.observer = kept
            steps.make()
            pipe.observer = None
        making.report("recording")
        step_s, timelines = [], []
        with ExitStack() as ranges:
            if options.nvtx:
                ranges.enter_context(_nvtx(steps))
            for number in range(options.steps):
                with _step_range(number) if options.nvtx else ExitStack():
                    step_s.append(steps.make())
                timelines.append(pipe.timelines())
        recording = _recording(steps)
        pipe.observer = None
        message_bytes = pipe.message_bytes()
        making.report("timing messages")
        channels = time_channels(
            pipe.groups, sorted(channels_of(pipe.schedule.placement)), max(message_bytes, default=0)
        )
        reduce_s = time_reductions(pipe.groups, making.gradient_bytes, sharded=making.config.parallel.shard_optimizer)
        if options.torch_profiler:
            making.report("making a step under torch's profiler")
            trace_with_torch(steps, folder)
        if options.memory_snapshot:
            making.report("making a step with the allocator's history")
            snapshot_memory(steps, folder)
        return Recorded(
            schedule=pipe.schedule,
            timelines=tuple(timelines),
            step_s=_of_first_rank(steps, step_s),
            message_bytes=message_bytes,
            kept_bytes=_most_anywhere(steps, kept.per_stage(pipe.schedule.num_stages)),
            channels=channels,
            reduce_s=reduce_s,
            recording=recording,
        )
    finally:
        steps.close()


def _nvtx(steps: Steps) -> AbstractContextManager[object]:
    """Return what sets the ranges that ``timeline.nsys`` reads: of the rank, and within it of each action.

    Backwards then run on the thread that asks for them: a kernel is told to belong to a range by the thread that
    launched it.
    """
    stack = ExitStack()
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    steps.pipe.observer = named_ranges(push, pop)
    stack.enter_context(torch.autograd.set_multithreading_enabled(False))
    groups = steps.pipe.groups
    where = f"rank {groups.pipeline_rank} of pipeline {groups.rank % groups.grid.width}"
    stack.enter_context(ranged(where, push, pop))
    return stack


def _step_range(number: int) -> AbstractContextManager[None]:
    return ranged(f"step {number}", torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)


def _of_first_rank(steps: Steps, seconds: Sequence[float]) -> tuple[float, ...]:
    everywhere = steps.pipe.groups.gather(torch.tensor(seconds, dtype=torch.float64))
    return tuple(everywhere[0].tolist())


def _most_anywhere(steps: Steps, numbers: Sequence[int]) -> list[int]:
    most: list[int] = torch.stack(steps.pipe.groups.gather(torch.tensor(numbers))).amax(0).tolist()
    return most


def _recording(steps: Steps) -> Recording:
    events, event_s = steps.pipe.recording()
    everywhere = torch.stack(steps.pipe.groups.gather(torch.tensor([events, event_s], dtype=torch.float64)))
    return Recording(events=int(everywhere[:, 0].max()), event_s=float(everywhere[:, 1].max()))


def _title(config: TrainConfig, device: torch.device) -> str:
    if config.profile.virtual:
        return "virtual device"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
