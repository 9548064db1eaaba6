"""What each rank of a simulated step holds at its peak: parameters and their states, activations, buffers, margin."""

from chimera.ir.versions import weight_versions
from chimera.plan.activations import FULL, NONE, RECOMPUTE_CODES, block_activation_bytes, head_activation_bytes
from chimera.plan.closed import message_bytes
from chimera.plan.dims import Dims
from chimera.plan.estimate import RankMemory
from chimera.plan.folding import Step
from chimera.plan.hardware import DTYPE_BYTES
from chimera.plan.memory import margin_bytes, message_buffer_bytes, optimizer_bytes
from chimera.plan.stages import StagedLayout

__all__ = ["rank_memory", "stage_activation_bytes"]


def rank_memory(parts: StagedLayout, step: Step) -> tuple[RankMemory, ...]:
    """Return the bytes of each rank at its peak; a weight counts as often as an asynchronous schedule keeps versions.

    Args:
        parts: the layout.
        step: of it, simulated with the activations of ``stage_activation_bytes``.
    """
    layout, dtype, placement = parts.layout, parts.software.dtype, parts.schedule.placement
    message = message_bytes(parts.rates, parts.stacks, parts.sharing.microbatch) / layout.tensor
    replicas = layout.data * parts.copies if layout.sharded else 1
    versions = weight_versions(parts.schedule)
    made = []
    for rank in parts.ranks:
        held = placement.stages_on(rank)
        count = sum(parts.parameters[stage] for stage in held)
        kept = sum(parts.parameters[stage] * versions[rank][stage] for stage in held)
        named = {
            "weights": kept * DTYPE_BYTES[dtype],
            "gradients": count * parts.software.gradient_bytes,
            "optimizer": count * optimizer_bytes(dtype) / replicas,
            "activations": float(step.peak_bytes[rank]),
            "working": _working(parts, has_head=parts.schedule.num_stages - 1 in held),
            "buffers": float(message_buffer_bytes(message, float(layout.pipeline))),
        }
        made.append(RankMemory(**named, margin=float(margin_bytes(sum(named.values())))))
    return tuple(made)


def stage_activation_bytes(parts: StagedLayout) -> list[float]:
    """Return the bytes that each stage keeps of one micro-batch from its forward to its backward."""
    recompute = RECOMPUTE_CODES[parts.layout.recompute]
    kept: list[float] = [
        sum(count * _block(parts, dims, recompute) for count, dims in zip(row, parts.stacks, strict=True))
        for row in parts.per_stage
    ]
    sharing = parts.sharing
    kept[-1] += float(
        head_activation_bytes(
            parts.stacks[-1],
            microbatch=sharing.microbatch,
            tensor=sharing.tensor,
            sequence_parallel=sharing.sequence_parallel,
            vocab=float(parts.vocab),
        )
    )
    return kept


def _block(parts: StagedLayout, dims: Dims, recompute: int) -> float:
    sharing = parts.sharing
    return float(
        block_activation_bytes(
            dims,
            microbatch=sharing.microbatch,
            tensor=sharing.tensor,
            sequence_parallel=sharing.sequence_parallel,
            recompute=recompute,
            element_bytes=parts.rates.element_bytes,
            fused_attention=parts.software.fused_attention,
        )
    )


def _working(parts: StagedLayout, *, has_head: bool) -> float:
    """Return the bytes of one block while it is recomputed, or of the logits' gradient."""
    block = max(_block(parts, dims, NONE) for dims in parts.stacks) if parts.sharing.recompute == FULL else 0.0
    logits = 4.0 * parts.layout.microbatch * parts.shape.target_seq * parts.vocab / parts.layout.tensor
    return max(block, logits * has_head)
