"""How the blocks of a model are spread over the stages of a schedule: by a given cut, equally, or by their times."""

from chimera.errors import InfeasibleError, UsageError
from chimera.plan.closed import ModelTimes
from chimera.plan.layout import Layout
from chimera.plan.partition import partition
from chimera.plan.shape import ModelShape

__all__ = ["blocks_by_stack", "stage_blocks"]


def stage_blocks(shape: ModelShape, layout: Layout, num_stages: int, times: ModelTimes) -> tuple[int, ...]:
    """Return the blocks of each stage: the layout's own cut, an equal share, or the cut that balances the stages.

    Raises:
        InfeasibleError: there are more stages than blocks.
        UsageError: the layout's cut has another number of stages or of blocks.
    """
    total = shape.num_blocks
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
    if total % num_stages == 0 and len(times.blocks) == 1:
        return (total // num_stages,) * num_stages
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
