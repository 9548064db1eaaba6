"""``chimera bench simulate``: how long it takes here to build, check, lower and simulate large schedules.

It times the same calls that the other commands make; it neither changes nor caches anything.
"""

import json as json_form
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Final, TypeVar

from tyro.conf import Positional, arg

from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.errors import UsageError
from chimera.ir.checks import check
from chimera.ir.schedule import Schedule
from chimera.passes.lower import lower
from chimera.schedules import build_schedule
from chimera.simulate import simulate

__all__ = ["DEFAULT_SHAPES", "SimulateTimes", "bench_simulate", "measure_shape"]

DEFAULT_SHAPES: Final = ("64x256x2", "64x1024x4")
_SIMULATIONS: Final = 5
_SHAPE: Final = re.compile(r"(\d{1,6})x(\d{1,6})x(\d{1,3})", re.ASCII)

_Shapes = Annotated[
    tuple[str, ...],
    Positional,
    arg(metavar="RANKSxMICROBATCHESxCHUNKS", help_behavior_hint="(default: two large ones)"),
]
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class SimulateTimes:
    """Seconds of one shape of the interleaved schedule; ``load_s`` is what the first simulation takes beyond others.

    For large shapes that is loading numba and its compiled code, or compiling it where that has not been done before.
    """

    ranks: int
    microbatches: int
    chunks: int
    computations: int
    build_s: float
    check_s: float
    lower_s: float
    load_s: float
    simulate_s: float


def bench_simulate(shapes: _Shapes = DEFAULT_SHAPES, *, json: Flag = False) -> None:
    """Time building, checking, lowering and simulating interleaved schedules.

    Building ends with the table of actions, lowering includes its proof. The time to simulate is the median of five
    calls of the compute-only schedule, after one that loads the compiled code.

    Example:
        chimera bench simulate 64x256x2

    Args:
        shapes: ranks, micro-batches and chunks of each schedule
        json: print a JSON document instead
    """
    times = [measure_shape(shape) for shape in shapes]
    if json:
        print(json_form.dumps([asdict(row) for row in times], indent=1))
        return
    out = console()
    headings = [
        "ranks × micro-batches × chunks",
        "computations",
        "build s",
        "check s",
        "lower s",
        "load s",
        "simulate s",
    ]
    print_table(out, headings, [_row(row) for row in times])
    out.print()
    print_wrapped(out, "lower includes the proof of its result; load is what the first simulation takes beyond others.")


def measure_shape(shape: str) -> SimulateTimes:
    """Time one shape, written as 64x256x2.

    Raises:
        UsageError: the text is no shape, or the interleaved schedule does not have it.
    """
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise UsageError(f"{shape!r} is not a shape; needed: ranks, micro-batches and chunks, as in 64x256x2")
    ranks, microbatches, chunks = map(int, match.groups())

    def build() -> Schedule:
        schedule = build_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert len(schedule.table), "an interleaved schedule has actions"
        return schedule

    build_s, schedule = _timed(build)
    check_s, _ = _timed(lambda: check(schedule))
    lower_s, _ = _timed(lambda: lower(schedule))
    first_s, _ = _timed(lambda: simulate(schedule))
    simulate_s = statistics.median(_timed(lambda: simulate(schedule))[0] for _ in range(_SIMULATIONS))
    return SimulateTimes(
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        computations=len(schedule.table),
        build_s=build_s,
        check_s=check_s,
        lower_s=lower_s,
        load_s=max(first_s - simulate_s, 0.0),
        simulate_s=simulate_s,
    )


def _timed(call: Callable[[], _Value]) -> tuple[float, _Value]:
    begin = time.perf_counter()
    value = call()
    return time.perf_counter() - begin, value


def _row(row: SimulateTimes) -> Sequence[str]:
    seconds = (row.build_s, row.check_s, row.lower_s, row.load_s, row.simulate_s)
    sizes = f"{row.ranks} × {row.microbatches:,} × {row.chunks}"
    return [sizes, f"{row.computations:,}", *(f"{value:.3f}" for value in seconds)]
