"""``chimera bench reduce``: where gradient reductions cost least, measured on the virtual device.

Real processes, messages and reductions; computation is replaced by waits, which leave the host free for them, as a
device does. All modes take turns in one set of processes.
"""

import json as json_form
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import Positional, arg

from chimera.cli.options import Flag, SizeOptions, load_schedule, sizes_for
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.ir.costs import Costs
from chimera.ir.schedule import Schedule
from chimera.ir.timeline import Lane, Timeline
from chimera.launch.connect import connected
from chimera.launch.local import run_local
from chimera.launch.place import Place
from chimera.launch.processes import Tell
from chimera.passes.derived import compute_only
from chimera.passes.reductions import REDUCTION_MODES
from chimera.plot import plot_timeline
from chimera.plot.figure import check_paths
from chimera.runtime.pipeline import Pipeline
from chimera.runtime.virtual import VirtualLoss, virtual_batch, virtual_layers
from chimera.simulate import simulate

__all__ = ["ReduceRow", "bench_reduce"]

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ReduceRow:
    """One mode's figures.

    Attributes:
        mode: where reductions start; see ``passes.reductions``.
        step_s: the median step, of the slowest rank.
        over_ideal_s: how much longer that is than the schedule alone, with free communication.
        exposed_s: of the median step's timeline, from the last computation to the last reduction's end.
        runs_s: every run.
    """

    mode: str
    step_s: float
    over_ideal_s: float
    exposed_s: float
    runs_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """What every rank is told to measure."""

    schedule: Schedule
    costs: Costs
    gradient_bytes: int
    message_bytes: int
    runs: int


def bench_reduce(
    name: Annotated[str, Positional, arg(metavar="NAME|FILE")],
    sizes: SizeOptions,
    *,
    forward_ms: float = 20.0,
    backward_ms: float = 40.0,
    gradient_mib: float = 8.0,
    message_bytes: int = 262144,
    runs: int = 5,
    out: Path | None = None,
    json: Flag = False,
) -> None:
    """Measure where gradient reductions of a schedule cost least: at the end, as early as may be, or early in bubbles.

    Computation is a wait, messages and reductions are real. A schedule of one route has nothing to reduce here, as the
    measurement has no data-parallel replicas.

    Example:
        chimera bench reduce chimera --ranks 4 --microbatches 4 --gradient-mib 16 --out reductions.svg

    Args:
        name: a schedule's name, or a file
        sizes: of a schedule given by NAME; a FILE has its own
        forward_ms: forward of one micro-batch on one rank
        backward_ms: whole backward, likewise
        gradient_mib: MiB of gradients of each stage
        message_bytes: size of every activation and gradient that is sent
        runs: measured runs of each mode; the median is printed
        out: draw the modes' measured timelines there (.svg, .pdf or .png)
        json: print a JSON document instead
    """
    if runs < 1:
        raise UsageError(f"--runs {runs}: needed: at least 1")
    if not gradient_mib > 0.0 or min(forward_ms, backward_ms) < 0.0:
        raise UsageError("--gradient-mib has to be above 0, --forward-ms and --backward-ms at least 0")
    if out is not None:
        check_paths(out)
    schedule = compute_only(load_schedule(name, sizes_for([name], sizes)[0]))
    if all(len(schedule.placement.ranks_of(stage)) == 1 for stage in range(schedule.num_stages)):
        raise UsageError(
            f"schedule {schedule.name!r} has one copy of each stage, so there is nothing to reduce; take one with "
            "several routes, such as chimera"
        )
    job = _Job(
        schedule,
        Costs(forward=forward_ms / 1e3, backward=backward_ms / 1e3),
        round(gradient_mib * 2**20),
        message_bytes,
        runs,
    )
    rows, timelines = run_local(_Measure(job), schedule.num_ranks, preload=["chimera.cli.bench_reduce"])[0]
    if out is not None:
        plot_timeline([(f"{schedule.name}, {row.mode}", timelines[row.mode]) for row in rows], out)
    if json:
        print(json_form.dumps([asdict(row) for row in rows], indent=1))
        return
    _print(rows, job, out)


@dataclass(frozen=True, slots=True)
class _Measure:
    """What each rank runs."""

    job: _Job

    def __call__(self, place: Place, tell: Tell) -> tuple[list[ReduceRow], dict[str, Timeline]]:
        """Run every mode once to warm up, then in turn, and return the rows and the median steps' timelines."""
        del tell
        torch.set_num_threads(1)
        job = self.job
        costs = job.costs.resolve(job.schedule)
        layers = {
            mode: virtual_layers(costs, job.schedule.num_microbatches, gradient_bytes=job.gradient_bytes)
            for mode in REDUCTION_MODES
        }
        steps: dict[str, list[tuple[float, Timeline]]] = {mode: [] for mode in REDUCTION_MODES}
        with connected(place, timeout_s=_TIMEOUT_S) as group:
            pipes = {
                mode: Pipeline(layers[mode], job.schedule, VirtualLoss(len(layers[mode])), group, reduce=mode)
                for mode in REDUCTION_MODES
            }
            batch = virtual_batch(job.schedule.num_microbatches, job.message_bytes)
            for run in range(job.runs + 1):
                for mode, pipe in pipes.items():
                    # Ranks begin together: a late start of one would pass for a bubble.
                    pipe.groups.sum_everywhere(torch.zeros(1))
                    start = time.perf_counter()
                    pipe.step(*batch)
                    took = pipe.groups.gather(torch.tensor([time.perf_counter() - start], dtype=torch.float64))
                    timeline = pipe.timeline()
                    if run:
                        steps[mode].append((max(map(float, took)), timeline))
            for pipe in pipes.values():
                pipe.close()
        ideal_s = simulate(job.schedule, job.costs).makespan
        rows = [_row(mode, measured, ideal_s) for mode, measured in steps.items()]
        return rows, {mode: _median(measured)[1] for mode, measured in steps.items()}


def _median(measured: list[tuple[float, Timeline]]) -> tuple[float, Timeline]:
    return sorted(measured, key=lambda run: run[0])[len(measured) // 2]


def _row(mode: str, measured: list[tuple[float, Timeline]], ideal_s: float) -> ReduceRow:
    times = tuple(took for took, _ in measured)
    timeline = _median(measured)[1]
    computed = float(timeline.end[timeline.lane == Lane.COMPUTE].max())
    step_s = statistics.median(times)
    return ReduceRow(mode, step_s, step_s - ideal_s, max(0.0, timeline.finish - computed), times)


def _print(rows: list[ReduceRow], job: _Job, out: Path | None) -> None:
    terminal = console()
    headings = ["reductions", "step\nms", "over the\nschedule, ms", "behind the last\ncomputation, ms"]
    figures = ("step_s", "over_ideal_s", "exposed_s")
    print_table(
        terminal, headings, [[row.mode, *(f"{getattr(row, name) * 1e3:.1f}" for name in figures)] for row in rows]
    )
    terminal.print()
    best = min(rows, key=lambda row: row.step_s)
    print_wrapped(
        terminal,
        f"{job.schedule.name}, {job.schedule.num_ranks} ranks, {job.schedule.num_microbatches} micro-batches, "
        f"{job.gradient_bytes / 2**20:g} MiB of gradients per stage; median of {job.runs} runs. Least: {best.mode}."
        + (f" Timelines in {out}." if out is not None else ""),
    )
