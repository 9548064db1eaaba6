"""Compares the search by itself with every published schedule, and prints the table of docs/search.md.

For each number of ranks and of micro-batches each published schedule is built and its placement searched within its own
peak of memory, at F = I = W. ``better`` counts the sizes in which the search's order takes less than the published one,
``worse`` those in which it takes more, so that the published one stands in.

Usage: python scripts/search_table.py [--ranks 2 16] [--every-m] [--effort 100000]
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from chimera.errors import UsageError
from chimera.ir.costs import Costs
from chimera.ir.memory import peak_activations
from chimera.ir.schedule import Schedule
from chimera.schedules import build_schedule
from chimera.schedules.search.bounds import Objective
from chimera.schedules.search.problem import Problem
from chimera.schedules.search.searching import search, value_of
from chimera.simulate import simulate

COSTS = Costs(forward=1.0, backward=2.0)
FAMILIES = (
    ("linear", ("gpipe", "1f1b", "zb-h1", "zb-h2")),
    ("looped, v = 2", ("looped-bfs", "interleaved", "interleaved-zb")),
    ("vee", ("hanayo", "zb-v", "v-half", "v-min", "dualpipev")),
    ("bidirectional", ("gems", "chimera", "dualpipe")),
)


def sizes(first: int, last: int, *, every: bool) -> Iterator[tuple[int, int]]:
    """Yield (ranks, micro-batches), from p to 4p of them: all, or p, p + 1, 3p/2, 2p, 3p and 4p."""
    for ranks in range(first, last + 1):
        some = {ranks, ranks + 1, 3 * ranks // 2, 2 * ranks, 3 * ranks, 4 * ranks}
        yield from ((ranks, m) for m in (range(ranks, 4 * ranks + 1) if every else sorted(some)))


def built(name: str, ranks: int, microbatches: int) -> Schedule | None:
    """Return the published schedule, None where it takes other sizes."""
    try:
        return build_schedule(name, ranks=ranks, microbatches=microbatches)
    except UsageError:
        return None


def outcome(schedule: Schedule, objective: Objective, effort: int) -> str:
    """Say whether the search by itself is better than the schedule, equal or worse, within its memory."""
    limit = max(peak_activations(schedule))
    problem = Problem(schedule.placement, schedule.microbatch_to_route, COSTS, limit)
    found = search(problem, objective=objective, effort=effort)
    excess = found.searched / value_of(simulate(schedule, COSTS), objective) - 1
    return "equal" if abs(excess) < 1e-9 else "better" if excess < 0 else "worse"


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 16), metavar=("FIRST", "LAST"))
    parser.add_argument("--every-m", action="store_true", help="every number of micro-batches from p to 4p")
    parser.add_argument("--effort", type=int, default=100_000, help="computations that one search puts in order")
    options = parser.parse_args()
    print("| placement | published | clock | search better | equal | worse |\n|---|---|---|---|---|---|")
    for placement, names in FAMILIES:
        for name in names:
            pairs = sizes(*options.ranks, every=options.every_m)
            schedules = [each for ranks, m in pairs if (each := built(name, ranks, m)) is not None]
            for clock in get_args(Objective):
                count = Counter(outcome(schedule, clock, options.effort) for schedule in schedules)
                cells = (placement, f"`{name}`", clock, *(str(count[each]) for each in ("better", "equal", "worse")))
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
