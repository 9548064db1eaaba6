"""Looped breadth-first: GPipe's order over several model chunks per rank, each chunk finished before the next.

It knows the order of one rank; it refuses to know costs, messages and reductions.
"""

from chimera.ir.action import Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Schedule
from chimera.schedules.building import actions, linear, require_counts

__all__ = ["looped_bfs"]


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Build the looped breadth-first schedule: v = ``chunks`` stages per rank, stage s on rank s mod p.

    >>> for row in looped_bfs(2, 3, chunks=2).to_text():
    ...     print(row)
    0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2

    A chunk runs all its micro-batches before the next one starts, so a chunk's gradients are final, and their
    reduction can start, while the other chunks still compute. With v = 1 this is GPipe.

    Bubble: (p−1)/(v·m+p−1) of the total time, (p−1)/(v·m) of the ideal time, for m ≥ p; with fewer, each of the v
    chunks takes p micro-batches' time. Activations: m on every rank, in units of 1/p of the model for one
    micro-batch. Works for any p, v and m ≥ 1.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023 (arXiv 2211.05953), §4.

    Args:
        ranks: pipeline ranks p.
        microbatches: micro-batches m per step.
        chunks: model chunks v per rank.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("looped-bfs", ranks=ranks, microbatches=microbatches, chunks=chunks)
    with collector_paused():
        programs = []
        for rank in range(ranks):
            up = [chunk * ranks + rank for chunk in range(chunks) for _ in range(microbatches)]
            # Within a chunk the backwards keep the forwards' order, so only the chunks are reversed.
            down = [chunk * ranks + rank for chunk in reversed(range(chunks)) for _ in range(microbatches)]
            each = [*range(microbatches)] * chunks
            programs.append((*actions(Kind.F, up, each), *actions(Kind.B, down, each)))
    return Schedule("looped-bfs", linear(ranks, chunks), (0,) * microbatches, tuple(programs))
