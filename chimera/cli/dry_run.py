"""What ``chimera train --dry-run`` says of a run that it does not start: its ranks, what they hold and the bytes of it.

The numbers are those of ``train.dry_run`` and ``plan.ranks``; this module only sets them side by side.
"""

import dataclasses
import json as json_form
import sys
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, Final

from rich.console import Console

from chimera.cli.terminal import print_table, print_wrapped
from chimera.ir.schedule import Placement
from chimera.plan.buffers import StateBytes
from chimera.plan.ranks import RankGrid
from chimera.train.config import TrainConfig
from chimera.train.dry_run import RankHolds, embedding_stages, holds_of_ranks
from chimera.train.layout import Layout, predicted_bubble

__all__ = ["print_dry_run", "print_dry_run_json"]

_MOST_ROWS: Final = 64
"""More ranks than this are shown for the first replica alone: those of others follow in the same steps."""
_MIB: Final = 2**20
_HOLDS_HEADINGS: Final = (
    *("pipeline", "stages", "layers", "parameters"),
    *("weights", "gradients", "optimizer", "activations", "together"),
)
_HOLDS_LEGEND: Final = (
    "MiB on each rank at that place: weights in the type that computes, gradients in the type that sums them, for the "
    "optimizer its moments and, below fp32, the weights it updates; activations kept for backwards at the schedule's "
    "peak, with fused attention where it has no dropout. What a layer needs while it runs, and messages, come on top."
)


def print_dry_run(out: Console, config: TrainConfig, layout: Layout) -> None:
    """Print the tables of ranks and of what they hold."""
    grid, placement = config.grid, layout.schedule.placement
    holds, shared = holds_of_ranks(config, layout), embedding_stages(config, layout)
    out.print()
    headings = ("rank", "tensor", "data", "pipeline", "shares layers with", "replicas", "pipeline ranks", "embeddings")
    ranks = _shown(grid)
    print_table(out, headings, [_rank_row(rank, grid, placement, shared, holds) for rank in ranks])
    if len(ranks) < grid.size:
        print_wrapped(
            out,
            f"Of {grid.size:,} ranks those of the first data-parallel replica are shown; each further replica's are "
            f"{grid.tensor} higher.",
        )
    out.print()
    print_table(out, _HOLDS_HEADINGS, [_holds_row(place, held) for place, held in enumerate(holds)])
    print_wrapped(out, _HOLDS_LEGEND)
    print_wrapped(out, _heaviest_text(holds))
    if layout.schedule.is_asynchronous:
        print_wrapped(out, "So do the older weights that micro-batches of an asynchronous schedule still need.")
    out.print()
    print_wrapped(out, "Nothing was started (--dry-run).")


def print_dry_run_json(config: TrainConfig, layout: Layout) -> None:
    """Print the same as one JSON object."""
    grid, placement, schedule = config.grid, layout.schedule.placement, layout.schedule
    holds, shared = holds_of_ranks(config, layout), embedding_stages(config, layout)
    json_form.dump(
        {
            "world_size": grid.size,
            "tensor": grid.tensor,
            "data": grid.data,
            "pipeline": grid.pipeline,
            "schedule": schedule.name,
            "microbatches": schedule.num_microbatches,
            "global_batch": layout.global_batch,
            "predicted_bubble": predicted_bubble(schedule),
            "ranks": [
                {
                    **grid.place(rank)._asdict(),
                    "rank": rank,
                    "tensor_group": grid.tensor_group(rank),
                    "data_group": grid.data_group(rank),
                    "pipeline_group": grid.pipeline_group(rank),
                    "embedding_group": _embedding_group(rank, grid, placement, shared),
                }
                for rank in range(grid.size)
            ],
            "places": [_held_as_json(held) for held in holds],
            "heaviest_place": _heaviest(holds),
        },
        sys.stdout,
        indent=1,
    )
    sys.stdout.write("\n")


def _shown(grid: RankGrid) -> list[int]:
    everyone = range(grid.size)
    return list(everyone) if grid.size <= _MOST_ROWS else [rank for rank in everyone if grid.place(rank).data == 0]


def _rank_row(
    rank: int, grid: RankGrid, placement: Placement, shared: Sequence[int], holds: Sequence[RankHolds]
) -> list[str]:
    place = grid.place(rank)
    replicas = {other for stage in holds[place.pipeline].stages for other in placement.ranks_of(stage)}
    return [
        str(rank),
        str(place.tensor),
        str(place.data),
        str(place.pipeline),
        _ranks_text(grid.tensor_group(rank)),
        _ranks_text(grid.holders(rank, replicas)),
        _ranks_text(grid.pipeline_group(rank)),
        _ranks_text(_embedding_group(rank, grid, placement, shared)),
    ]


def _embedding_group(rank: int, grid: RankGrid, placement: Placement, shared: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of the ``shared`` stages that sum the word embedding's gradient together with ``rank``."""
    holders = {holder for stage in shared for holder in placement.ranks_of(stage)}
    return grid.holders(rank, holders) if grid.place(rank).pipeline in holders else ()


def _holds_row(place: int, held: RankHolds) -> list[str]:
    kept = held.bytes
    return [
        str(place),
        _ranks_text(held.stages),
        _ranks_text(held.layers),
        f"{held.parameters:,}",
        *(
            f"{size / _MIB:,.1f}"
            for size in (kept.parameters, kept.gradients, kept.optimizer, held.activations, held.total)
        ),
    ]


def _heaviest(holds: Sequence[RankHolds]) -> int:
    """Return the place that keeps most, the first of equal ones."""
    return max(range(len(holds)), key=lambda place: holds[place].total)


def _heaviest_text(holds: Sequence[RankHolds]) -> str:
    place = _heaviest(holds)
    most = f"{holds[place].total / _MIB:,.1f} MiB"
    equal = [other for other, held in enumerate(holds) if held.total == holds[place].total]
    if len(equal) > 1:
        return f"The heaviest places are {_ranks_text(equal)}, with {most} on each rank."
    return f"The heaviest place is {place}, with {most} on each rank."


def _held_as_json(held: RankHolds) -> dict[str, Any]:
    bytes_of: StateBytes = held.bytes
    return {
        "stages": held.stages,
        "layers": held.layers,
        "parameters": held.parameters,
        "bytes": {**dataclasses.asdict(bytes_of), "activations": held.activations, "total": held.total},
    }


def _ranks_text(ranks: Sequence[int]) -> str:
    """Write ascending numbers in few characters.

    >>> _ranks_text((0, 1, 2, 3)), _ranks_text((1, 5)), _ranks_text((0, 8, 16, 24)), _ranks_text(())
    ('0-3', '1 5', '0-24 by 8', '-')
    >>> _ranks_text((0, 1, 2, 10, 11, 12, 20))
    '0-2 10-12 20'
    """
    if not ranks:
        return "-"
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        (step,) = steps
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    # Neighbours differ from their places in the row by the same number.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)
