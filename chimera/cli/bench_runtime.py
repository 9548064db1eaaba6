"""``chimera bench runtime``: what the runtime adds to a schedule's own time, on the virtual device.

Real processes and messages, computation replaced by waits. All contenders take turns in one set of processes; what is
printed is the median of several runs, beside the time the schedule itself needs when communication is free.
"""

import json as json_form
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not listed
from tyro.conf import Positional, arg

from chimera.cli.contenders import Contender, Measurement, measure, ours, torch_counterparts, torchs
from chimera.cli.options import Flag, SizeOptions, load_schedule, sizes_for
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.ir.action import Kind
from chimera.ir.costs import Costs
from chimera.ir.schedule import Schedule
from chimera.launch.connect import connected
from chimera.launch.local import run_local
from chimera.launch.place import Place
from chimera.launch.processes import Tell
from chimera.simulate import simulate

__all__ = ["RuntimeRow", "bench_runtime"]

_TIMEOUT_S = 300.0
_DEFAULT_CHUNKS = 2
_TOGETHER = "pairs together"


@dataclass(frozen=True, slots=True)
class RuntimeRow:
    """One contender's figures.

    Attributes:
        name: the schedule; torch's begin with "torch", those whose pairs run as one end with "pairs together".
        ideal_s: the schedule's makespan with free communication; None where it is unknown.
        step_s: the median step, of the slowest rank.
        ratio: step_s over ideal_s.
        runs_s: every run.
        cpu_us_per_action: CPU time of all ranks over all their forwards and backwards, with no computation in them.
        cpu_us_per_pair: the same over micro-batches: a forward and a backward through all ranks.
    """

    name: str
    ideal_s: float | None
    step_s: float
    ratio: float | None
    runs_s: tuple[float, ...]
    cpu_us_per_action: float
    cpu_us_per_pair: float


@dataclass(frozen=True, slots=True)
class _Own:
    """One of our contenders; its pairs run together where ``costs`` have a time for them."""

    name: str
    schedule: Schedule
    costs: Costs

    @property
    def together(self) -> bool:
        """Whether its pairs run together."""
        return self.costs.overlap is not None

    @property
    def ideal_s(self) -> float:
        """The makespan with free communication."""
        return simulate(self.schedule, self.costs, pairs_together=self.together).makespan


@dataclass(frozen=True, slots=True)
class _Job:
    """What every rank is told to measure."""

    own: tuple[_Own, ...]
    torch_names: tuple[str, ...]
    ranks: int
    microbatches: int
    chunks: int
    costs: Costs
    message_bytes: int
    runs: int
    backend: Literal["auto", "gloo"]


def bench_runtime(
    names: Annotated[tuple[str, ...], Positional, arg(metavar="NAME|FILE...", help_behavior_hint="")],
    sizes: SizeOptions,
    *,
    forward_ms: float = 20.0,
    backward_ms: float = 40.0,
    weight_grad_ms: float | None = None,
    overlap_ms: float | None = None,
    message_bytes: int = 262144,
    runs: int = 5,
    against: Literal["none", "torch"] = "none",
    backend: Literal["auto", "gloo"] = "auto",
    json: Flag = False,
) -> None:
    """Measure step times of schedules on the virtual device against their ideal, and the runtime's own CPU time.

    --chunks, --pairs, --unit, --waves and --memory-limit go to the schedules that take them. With --against torch, the
    schedule of torch.distributed.pipelining of the same name runs in turn with ours; where it has none, every one it
    offers. A schedule with pairs of a forward and a backward is measured twice: with one after the other, and together.

    Example:
        chimera bench runtime 1f1b chimera --ranks 8 --microbatches 8 --against torch

    Args:
        names: schedules' names, or files
        sizes: of a schedule given by NAME; a FILE has its own
        forward_ms: forward of one micro-batch on one rank (a chunk takes 1/v of it)
        backward_ms: whole backward, likewise
        weight_grad_ms: the part of it that a W takes (default: half)
        overlap_ms: a forward and a backward run together as a pair (default: their sum)
        message_bytes: size of every activation and gradient that is sent
        runs: measured runs; the median is printed
        against: another runtime to measure in turn
        backend: how our messages go: auto shares memory between the ranks of this host, gloo is what they take between
            hosts, and all that torch has
        json: print a JSON document instead
    """
    if not names:
        raise UsageError("bench runtime needs a schedule; try: bench runtime 1f1b chimera --ranks 8 --microbatches 8")
    for option, value, least in (("runs", runs, 1), ("message-bytes", message_bytes, 4)):
        if value < least:
            raise UsageError(f"--{option} {value}: needed: at least {least}")
    if min(forward_ms, backward_ms, overlap_ms or 0.0) < 0:
        raise UsageError("--forward-ms, --backward-ms and --overlap-ms are times; needed: at least 0")
    costs = Costs(
        forward=forward_ms / 1e3,
        backward=backward_ms / 1e3,
        weight_grad=None if weight_grad_ms is None else weight_grad_ms / 1e3,
    )
    schedules = tuple((n, load_schedule(n, own, costs)) for n, own in zip(names, sizes_for(names, sizes), strict=True))
    ranks = {schedule.num_ranks for _, schedule in schedules}
    if len(ranks) != 1:
        raise UsageError(f"the schedules have {', '.join(map(str, sorted(ranks)))} ranks; needed: all the same")
    paired = replace(costs, overlap=(forward_ms + backward_ms if overlap_ms is None else overlap_ms) / 1e3)
    job = _Job(
        own=tuple(own for name, schedule in schedules for own in _forms(name, schedule, costs, paired)),
        torch_names=_counterparts(schedules) if against == "torch" else (),
        ranks=ranks.pop(),
        microbatches=sizes.microbatches or schedules[0][1].num_microbatches,
        chunks=sizes.chunks or _DEFAULT_CHUNKS,
        costs=costs,
        message_bytes=message_bytes,
        runs=runs,
        backend=backend,
    )
    rows = run_local(_Measure(job), job.ranks, preload=["chimera.cli.contenders", "chimera.cli.bench_runtime"])[0]
    if json:
        print(json_form.dumps([asdict(row) for row in rows], indent=1))
        return
    _print(rows, job)


def _forms(name: str, schedule: Schedule, costs: Costs, paired: Costs) -> list[_Own]:
    """Return a schedule as it runs without overlapped forms, and beside it, where it has pairs, with them."""
    own = [_Own(name, schedule, costs)]
    if schedule.table.paired.any():
        own.append(_Own(f"{name}, {_TOGETHER}", schedule, paired))
    return own


def _without_times(job: _Job) -> _Job:
    free = Costs(forward=0.0, backward=0.0)
    own = tuple(replace(own, costs=replace(free, overlap=0.0) if own.together else free) for own in job.own)
    return replace(job, own=own, costs=free)


def _counterparts(schedules: Sequence[tuple[str, Schedule]]) -> tuple[str, ...]:
    found = (
        torch_counterparts(
            name,
            splits=bool((schedule.table.kind == Kind.W).any()),
            ranks=schedule.num_ranks,
            microbatches=schedule.num_microbatches,
        )
        for name, schedule in schedules
    )
    return tuple(dict.fromkeys(other for others in found for other in others))


@dataclass(frozen=True, slots=True)
class _Measure:
    """What each rank runs."""

    job: _Job

    def __call__(self, place: Place, tell: Tell) -> list[RuntimeRow]:
        """Measure with waits, then without, and return the rows."""
        del tell
        torch.set_num_threads(1)
        with connected(place, timeout_s=_TIMEOUT_S) as group:
            if group is None:
                # torch's stages want a group even on their own.
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            waiting = _contenders(self.job)
            measured = measure(waiting, self.job.runs)
            idle = _contenders(_without_times(self.job))
            spent = measure(idle, self.job.runs)
            rows = [_row(contender, measured, spent, self.job) for contender in waiting]
            if group is None:
                dist.destroy_process_group()
            return rows


def _contenders(job: _Job) -> list[Contender]:
    return [ours(own.name, own.schedule, own.costs, job.message_bytes, job.backend) for own in job.own] + [
        torchs(
            name,
            ranks=job.ranks,
            microbatches=job.microbatches,
            chunks=job.chunks,
            costs=job.costs,
            message_bytes=job.message_bytes,
        )
        for name in job.torch_names
    ]


def _row(
    contender: Contender, measured: dict[str, Measurement], spent: dict[str, Measurement], job: _Job
) -> RuntimeRow:
    own = {one.name: one for one in job.own}
    found = own.get(contender.name) or own.get(contender.name.removeprefix("torch "))
    ideal = found.ideal_s if found is not None else None
    times = measured[contender.name]
    cpu_us = spent[contender.name].median_cpu_s * 1e6
    return RuntimeRow(
        name=contender.name,
        ideal_s=ideal,
        step_s=times.median_s,
        ratio=times.median_s / ideal if ideal else None,
        runs_s=times.step_s,
        cpu_us_per_action=cpu_us / (contender.num_computations * job.ranks),
        cpu_us_per_pair=cpu_us / (contender.num_computations / 2),
    )


def _print(rows: list[RuntimeRow], job: _Job) -> None:
    out = console()
    headings = ["schedule", "ideal\nms", "measured\nms", "measured\n/ ideal", "CPU µs\nper action", "CPU µs\nper pair"]
    print_table(
        out,
        headings,
        [
            [
                row.name,
                "–" if row.ideal_s is None else f"{row.ideal_s * 1e3:.1f}",
                f"{row.step_s * 1e3:.1f}",
                "–" if row.ratio is None else f"{row.ratio:.3f}",
                f"{row.cpu_us_per_action:.0f}",
                f"{row.cpu_us_per_pair:.0f}",
            ]
            for row in rows
        ],
    )
    out.print()
    note = (
        f"{job.ranks} ranks, {job.microbatches} micro-batches, messages of {job.message_bytes:,} bytes, "
        f"{'through shared memory' if job.backend == 'auto' else 'over gloo'} (torch: over gloo); median of "
        f"{job.runs} runs. Ideal: the schedule with free communication. CPU: with no computation, of all ranks "
        "together; per pair: of one micro-batch's forward and backward through one chunk per rank."
    )
    if any(own.together for own in job.own):
        note += (
            f" {_TOGETHER.capitalize()}: each overlapped pair is one span with both results at its end; in the row "
            "above, its forward runs and then its backward."
        )
    print_wrapped(out, note)
    torchs_rows = [row for row in rows if row.name.startswith("torch ")]
    if torchs_rows:
        best = min(torchs_rows, key=lambda row: row.step_s)
        fastest = min((row for row in rows if row not in torchs_rows), key=lambda row: row.step_s)
        out.print()
        print_wrapped(
            out,
            f"Best of torch here: {best.name.removeprefix('torch ')}, {best.step_s * 1e3:.1f} ms; best of ours: "
            f"{fastest.name}, {fastest.step_s * 1e3:.1f} ms, {best.step_s / fastest.step_s:.2f} × as fast.",
        )
