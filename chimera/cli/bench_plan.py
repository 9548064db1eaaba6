"""``chimera bench plan``: how fast the planner bounds and searches layouts here, and how far its predictions are off.

It times the calls that the commands make; it neither searches nor predicts anything itself.
"""

import json as json_form
import resource
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from chimera.cli.options import Flag
from chimera.cli.terminal import console, print_table, print_wrapped
from chimera.plan.hardware import Cluster
from chimera.plan.hardware_file import read_device, read_software
from chimera.plan.planning import DEFAULT_SOFTWARE, plan
from chimera.plan.search.bounded import prices_by_routes
from chimera.plan.search.bounds import quick
from chimera.plan.search.model_pricing import ModelPricing
from chimera.plan.search.skeleton import traits
from chimera.plan.search.space import Grid, Reason, SearchSpace, grids
from chimera.plan.shape import ModelShape
from chimera.plan.validate import VALIDATIONS, validate

__all__ = ["SearchTimes", "bench_plan", "bounds_per_second", "measure_search"]

_SEARCHES: Final = (
    ("GPT-3 175B", ModelShape(family="gpt", hidden=12288, layers=96, heads=96, vocab=51200, seq=2048), 1024, 1536),
    ("1T", ModelShape(family="gpt", hidden=25600, layers=128, heads=160, vocab=51200, seq=2048), 3072, 3072),
)
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class SearchTimes:
    """One search from a cold start of the planner's caches, on one core."""

    model: str
    gpus: int
    layouts: int
    simulated: int
    search_s: float
    most_memory_mib: float
    best_tflops: float


def bench_plan(*, validation: bool = True, json: Flag = False) -> None:
    """Time the planner: bounds per second, whole searches and their memory; then its errors against published runs.

    The searches are GPT-3 175B on 1,024 and a model of 1T parameters on 3,072 A100 80 GB, everything searched.

    Example:
        chimera bench plan

    Args:
        validation: also recompute the published tables
        json: print a JSON document instead
    """
    rate = bounds_per_second()
    searches = [measure_search(*each) for each in _SEARCHES]
    errors = {name: validate(name).errors for name in VALIDATIONS} if validation else {}
    if json:
        print(
            json_form.dumps(
                {
                    "bounds_per_s": rate,
                    "searches": [asdict(each) for each in searches],
                    "validation": {name: asdict(each) for name, each in errors.items()},
                },
                indent=1,
            )
        )
        return
    out = console()
    out.print(f"{rate:,.0f} layouts a second bounded in time and memory, before any is simulated")
    out.print()
    headings = ("search", "GPUs", "layouts", "simulated", "s", "MiB", "TFLOP/s\nper GPU")
    print_table(
        out,
        headings,
        [
            (
                each.model,
                f"{each.gpus:,}",
                f"{each.layouts:,}",
                f"{each.simulated:,}",
                f"{each.search_s:.1f}",
                f"{each.most_memory_mib:,.0f}",
                f"{each.best_tflops:.0f}",
            )
            for each in searches
        ],
    )
    out.print()
    print_wrapped(out, "MiB: the most that the process has held so far. The first search loads compiled code.")
    if errors:
        out.print()
        rows = [
            (name, str(e.rows), f"{e.mean_pct:.2f}", f"{e.median_pct:.2f}", f"{e.max_pct:.1f}")
            for name, e in errors.items()
        ]
        print_table(out, ("error, %", "rows", "mean", "median", "max"), rows)


def measure_search(model: str, shape: ModelShape, gpus: int, global_batch: int) -> SearchTimes:
    """Time one search without the list scheduler's new orders."""
    cluster = Cluster.of(read_device("a100-80"), gpus)
    begin = time.perf_counter()
    found = plan(shape, cluster, global_batch=global_batch, refine=False)
    return SearchTimes(
        model=model,
        gpus=gpus,
        layouts=found.num_bounded,
        simulated=found.num_simulated,
        search_s=time.perf_counter() - begin,
        most_memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        best_tflops=found.best.model_flops_per_s / 1e12,
    )


def bounds_per_second() -> float:
    """Return how many layouts of the first search are priced and bounded in a second, one core, the best of a few."""
    _, shape, gpus, global_batch = _SEARCHES[0]
    cluster = Cluster.of(read_device("a100-80"), gpus)
    pricing = ModelPricing(shape, cluster, read_software(DEFAULT_SOFTWARE))
    # Schedules whose placement is built in no time: what is timed is the arithmetic.
    space = SearchSpace(schedules=("gpipe", "1f1b", "interleaved", "looped-bfs", "chimera", "zb-h1", "interleaved-zb"))
    rejected: Counter[Reason] = Counter()
    found = list(grids(shape, cluster, global_batch=global_batch, space=space, rejected=rejected))
    times = []
    count = 0
    for grid in found:  # build the placements once
        _bound_all(pricing, grid)
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        count = sum(_bound_all(pricing, grid) for grid in found)
        times.append(time.perf_counter() - begin)
    return count / min(times)


def _bound_all(pricing: ModelPricing, grid: Grid) -> int:
    known = [traits(variant, grid.pipeline) for variant in grid.variants]
    prices = prices_by_routes(pricing, grid, known)
    bounds = quick(
        known,
        [prices[each.routes] for each in known],
        [variant.chunks or 1 for variant in grid.variants],
        blocks=pricing.shape.num_blocks,
        pipeline=grid.pipeline,
        microbatches=np.array([[grid.microbatches(b)] for b in grid.microbatch]),
        equal=grid.equal(),
    )
    return bounds.time_s.size
