"""Interleaved 1F1B: several model chunks per rank, so that the pipeline fills and drains in smaller steps.

It knows the order of one rank; it refuses to know costs, messages and reductions. The micro-batches go through the
chunks in groups. A group of p is the published schedule; here a group may be larger, or have empty places, which is
what makes every number of micro-batches work.
"""

from itertools import pairwise

from chimera.ir.action import Action, Kind
from chimera.ir.collector import collector_paused
from chimera.ir.schedule import Schedule
from chimera.schedules.building import actions, linear, merge_1f1b, require_counts
from chimera.schedules.one_f_one_b import program_1f1b

__all__ = ["interleaved", "interleaved_program", "microbatch_groups"]


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Build the interleaved schedule: v = ``chunks`` stages per rank, stage s on rank s mod p.

    >>> for row in interleaved(2, 4, chunks=2).to_text():
    ...     print(row)
    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    A rank's forwards take group by group of p micro-batches, and in each group chunk by chunk; its backwards likewise
    with the chunks reversed. It runs 2(p − rank − 1) + (v − 1)p forwards, at most m·v, before it alternates. With
    v = 1 this is 1F1B.

    Where p does not divide m, there are as many groups as m/p rounds to, as even as possible. Groups above p keep the
    bubble of the formula and hold (v − 1)/v micro-batches more for each one above p, at most p/2. Groups below p leave
    places empty; the step is never longer, and holds no more, than with the next multiple of p.

    Bubble: (p−1)/(v·m) of the ideal time, (p−1)/(v·m+p−1) of the total time, for m a multiple of p, or m ≥ p with a
    remainder of at most p/2. Activations of rank 0: p·(1 + (p−1)/(p·v)) for m a multiple of p and m ≥ 2p, in units of
    1/p of the model for one micro-batch; at most m. Works for any p, v and m ≥ 1.

    Source: Narayanan et al., SC 2021 (arXiv 2104.04473), §2.2.2; the groups for other m are ours.

    Args:
        ranks: pipeline ranks p.
        microbatches: micro-batches m per step.
        chunks: model chunks v per rank.

    Raises:
        UsageError: a count is below 1.
    """
    require_counts("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    with collector_paused():
        if chunks == 1:
            programs = tuple(program_1f1b(ranks, rank, microbatches) for rank in range(ranks))
        else:
            groups = microbatch_groups(ranks, microbatches)
            ahead = (chunks - 1) * len(groups[0])
            programs = tuple(
                interleaved_program(ranks, rank, groups, chunks, backward=Kind.B, warmup=2 * (ranks - rank - 1) + ahead)
                for rank in range(ranks)
            )
    return Schedule("interleaved", linear(ranks, chunks), (0,) * microbatches, programs)


_EMPTY = -1
"""A place in a group that no micro-batch takes; its actions never leave this module."""


def microbatch_groups(ranks: int, microbatches: int) -> list[list[int]]:
    """Return groups of equal length, at least ``ranks`` places each, that hold the micro-batches in order.

    >>> microbatch_groups(4, 8), microbatch_groups(4, 9), microbatch_groups(4, 7)
    ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3, 4], [5, 6, 7, 8, -1]], [[0, 1, 2, 3], [4, 5, 6, -1]])
    """
    # m/p to the nearest whole number, a half downwards: larger groups cost some memory, empty places cost more time.
    count = max(1, (2 * microbatches + ranks - 1) // (2 * ranks))
    size, larger = divmod(microbatches, count)
    starts = [group * size + min(group, larger) for group in range(count + 1)]
    places = max(ranks, size + (larger > 0))
    return [[*range(start, end), *[_EMPTY] * (places - (end - start))] for start, end in pairwise(starts)]


def interleaved_program(
    ranks: int, rank: int, groups: list[list[int]], chunks: int, *, backward: Kind, warmup: int
) -> tuple[Action, ...]:
    """Return one rank's program: ``warmup`` forwards, then forward and ``backward`` (B or I) in turn, group by group.

    Places without a micro-batch keep the others in step and are then left out.
    """
    places = len(groups[0])
    up = [chunk * ranks + rank for chunk in range(chunks) for _ in range(places)] * len(groups)
    down = [chunk * ranks + rank for chunk in reversed(range(chunks)) for _ in range(places)] * len(groups)
    microbatches = [microbatch for group in groups for microbatch in group * chunks]
    merged = merge_1f1b(actions(Kind.F, up, microbatches), actions(backward, down, microbatches), warmup)
    if any(group[-1] == _EMPTY for group in groups):
        return tuple(action for action in merged if action.microbatch != _EMPTY)
    return tuple(merged)
