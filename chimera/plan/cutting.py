"""How the blocks of a model are spread over the stages of a schedule: by a given cut, equally, or by their times.

What counts is the heaviest rank, which may hold several stages. Blocks that are alike are dealt one by one; those of
two stacks are cut by ``partition``, which knows stages alone.
"""

import heapq
from collections.abc import Sequence

from chimera.errors import InfeasibleError, UsageError
from chimera.ir.schedule import Placement
from chimera.plan.closed import ModelTimes
from chimera.plan.layout import Layout
from chimera.plan.partition import partition
from chimera.plan.shape import ModelShape

__all__ = ["balanced_cut", "blocks_by_stack", "cut_by_cost", "equal_cut", "holders", "stage_blocks"]


def holders(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that hold each stage, over all routes, ascending."""
    return tuple(placement.ranks_of(stage) for stage in range(placement.num_stages))


def equal_cut(blocks: int, num_stages: int) -> tuple[int, ...] | None:
    """Return the same number of blocks for every stage, None where they do not divide.

    >>> equal_cut(12, 4), equal_cut(13, 4)
    ((3, 3, 3, 3), None)
    """
    return None if blocks % num_stages else (blocks // num_stages,) * num_stages


def cut_by_cost(blocks: int, holding: Sequence[tuple[int, ...]], *, embedding: float, head: float) -> tuple[int, ...]:
    """Return the cut whose heaviest rank is lightest, every stage with a block at least; of equal ones the evenest.

    Stages that the same ranks hold make a group. Blocks are dealt one by one to the group that has least per rank so
    far, there to the stage that has least, which is best for equal pieces.

    >>> line = [(0,), (1,), (2,), (3,)]
    >>> cut_by_cost(12, line, embedding=0.0, head=1.5), cut_by_cost(13, line, embedding=0.0, head=0.2)
    ((4, 3, 3, 2), (4, 3, 3, 3))
    >>> cut_by_cost(8, [(0,), (1,), (2,)] * 2, embedding=0.1, head=2.0)
    (1, 2, 1, 2, 1, 1)

    Args:
        blocks: blocks of the model, at least as many as stages.
        holding: for each stage, the ranks that hold it.
        embedding: time of what the first stage has besides, in blocks.
        head: time of what the last stage has besides, in blocks.
    """
    assert len(holding) <= blocks, "every stage has a block at least"
    extra = [0.0] * len(holding)
    extra[0] += embedding
    extra[-1] += head
    groups: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    for stage, ranks in enumerate(holding):
        groups.setdefault(ranks, []).append((1.0 + extra[stage], stage))
    for stages in groups.values():
        heapq.heapify(stages)
    # Load per rank of each group, its first stage to decide between equal ones, its ranks.
    waiting = [
        (sum(load for load, _ in stages) / len(ranks), min(stage for _, stage in stages), ranks)
        for ranks, stages in groups.items()
    ]
    heapq.heapify(waiting)
    counts = [1] * len(holding)
    for _ in range(blocks - len(holding)):
        least, first, ranks = waiting[0]
        load, stage = groups[ranks][0]
        counts[stage] += 1
        heapq.heapreplace(groups[ranks], (load + 1.0, stage))
        heapq.heapreplace(waiting, (least + 1.0 / len(ranks), first, ranks))
    return tuple(counts)


def balanced_cut(blocks: int, placement: Placement, times: ModelTimes) -> tuple[int, ...]:
    """Return the cut by cost of blocks that are alike, whose times and whose ends' are given."""
    block = float(times.blocks[0].total_s)
    embedding, head = (float(layer.total_s) / block for layer in (times.embedding, times.head))
    return cut_by_cost(blocks, holders(placement), embedding=embedding, head=head)


def stage_blocks(shape: ModelShape, layout: Layout, placement: Placement, times: ModelTimes) -> tuple[int, ...]:
    """Return the blocks of each stage: the layout's own cut, an equal share, or the cut that balances the ranks.

    Raises:
        InfeasibleError: there are more stages than blocks.
        UsageError: the layout's cut has another number of stages or of blocks.
    """
    total, num_stages = shape.num_blocks, placement.num_stages
    if layout.cut is not None:
        if len(layout.cut) != num_stages or sum(layout.cut) != total:
            raise UsageError(
                f"the cut has {len(layout.cut)} stages and {sum(layout.cut)} blocks; needed: {num_stages} and {total}"
            )
        return layout.cut
    if num_stages > total:
        raise InfeasibleError(
            f"{num_stages} stages for {total} blocks; needed: one each; take fewer --pipeline ranks or --chunks"
        )
    if len(times.blocks) == 1:
        if (equal := equal_cut(total, num_stages)) is not None:
            return equal
        return balanced_cut(total, placement, times)
    costs = [
        float(block.total_s)
        for block, count in zip(times.blocks, _blocks_of_stacks(shape), strict=True)
        for _ in range(count)
    ]
    costs[0] += float(times.embedding.total_s)
    costs[-1] += float(times.head.total_s)
    cut = partition(costs, num_stages)
    return tuple(cut.count(stage) for stage in range(num_stages))


def blocks_by_stack(shape: ModelShape, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return how many blocks of each stack each stage has: of the one stack, or of T5's encoder and decoder.

    Args:
        shape: the model.
        blocks: of each stage.
    """
    stacks = _blocks_of_stacks(shape)
    kinds = [stack for stack, count in enumerate(stacks) for _ in range(count)]
    rows, start = [], 0
    for count in blocks:
        own = kinds[start : start + count]
        rows.append(tuple(own.count(stack) for stack in range(len(stacks))))
        start += count
    return tuple(rows)


def _blocks_of_stacks(shape: ModelShape) -> tuple[int, ...]:
    return (shape.encoder_layers, shape.layers) if shape.family == "t5" else (shape.layers,)
