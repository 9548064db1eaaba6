"""Cuts of equal blocks over stages whose first and last have an embedding and a head besides.

The general cut of unlike layers is ``plan.partition``; blocks that are alike need no search.
"""

import heapq

__all__ = ["cut_by_cost", "equal_cut"]


def equal_cut(blocks: int, num_stages: int) -> tuple[int, ...] | None:
    """Return the same number of blocks for every stage, None where they do not divide.

    >>> equal_cut(12, 4), equal_cut(13, 4)
    ((3, 3, 3, 3), None)
    """
    return None if blocks % num_stages else (blocks // num_stages,) * num_stages


def cut_by_cost(blocks: int, num_stages: int, *, embedding: float, head: float) -> tuple[int, ...]:
    """Return the cut whose heaviest stage is lightest, every stage with a block at least; of equal ones the evenest.

    Blocks are dealt one by one to the stage that has least so far, which is best for equal pieces.

    >>> cut_by_cost(12, 4, embedding=0.0, head=1.5), cut_by_cost(13, 4, embedding=0.0, head=0.2)
    ((4, 3, 3, 2), (4, 3, 3, 3))

    Args:
        blocks: blocks of the model.
        num_stages: stages, at most as many as blocks.
        embedding: time of what the first stage has besides, in blocks.
        head: time of what the last stage has besides, in blocks.
    """
    assert num_stages <= blocks, "every stage has a block at least"
    extra = [0.0] * num_stages
    extra[0] += embedding
    extra[-1] += head
    counts = [1] * num_stages
    load = [(1.0 + more, stage) for stage, more in enumerate(extra)]
    heapq.heapify(load)
    for _ in range(blocks - num_stages):
        light, stage = heapq.heappop(load)
        counts[stage] += 1
        heapq.heappush(load, (light + 1.0, stage))
    return tuple(counts)
