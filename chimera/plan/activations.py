"""Bytes that a block keeps from its forward to its backward (Korthikanti et al. 2022, §4), in 16-bit formats.

For a GPT block s·b·h (10 + 24/t + 5as/(ht)) without recomputation; every term of it is listed below, so that gated,
grouped and cross-attending blocks have theirs. Tensor parallelism shares out the second and third term, sequence
parallelism the first as well. A fused attention (FlashAttention) keeps no scores.
"""

import numpy as np

from chimera.plan.dims import Dims, Number

__all__ = ["FULL", "NONE", "RECOMPUTE_CODES", "SELECTIVE", "block_activation_bytes", "head_activation_bytes"]

NONE, SELECTIVE, FULL = 0, 1, 2
RECOMPUTE_CODES = {"none": NONE, "selective": SELECTIVE, "full": FULL}
"""Recompute modes as the numbers that columns of candidates hold."""


def block_activation_bytes(
    dims: Dims,
    *,
    microbatch: Number,
    tensor: Number,
    sequence_parallel: Number,
    recompute: Number,
    element_bytes: Number = 2.0,
    fused_attention: bool = False,
) -> Number:
    """Return the bytes that one block keeps of one micro-batch on one rank.

    Args:
        dims: widths of the block.
        microbatch: b.
        tensor: t.
        sequence_parallel: 1 or 0.
        recompute: ``NONE``, ``SELECTIVE`` or ``FULL``.
        element_bytes: of one number; masks take one byte whatever the format.
        fused_attention: whether scores are never kept.
    """
    e, drop = element_bytes, dims.dropout
    cross = dims.cross_seq > 0
    shared = np.where(sequence_parallel, tensor, 1.0)
    # Inputs of the normalisations and of the products behind them; masks of the two residual branches.
    whole = dims.hidden * (4 * e + 2 * drop + cross * (2 * e + drop))
    # Queries, keys, values and the input of the projection; the feed-forward layer's inner tensors.
    inner = dims.query * 2 * e + dims.kv * 2 * e
    crossed = cross * (dims.query * 2 * e + dims.kv * 2 * e * dims.cross_seq / dims.seq)
    feed_forward = dims.ffn * e * np.where(dims.inputs > 1, 3.0, 2.0)
    scores = dims.heads * (dims.seq + dims.cross_seq) * (e + drop * (1 + e))
    if fused_attention:
        scores = scores * 0.0
    scores = np.where(recompute == SELECTIVE, 0.0, scores)
    per_token = whole / shared + (inner + crossed + feed_forward + scores) / tensor
    kept: Number = microbatch * dims.seq * np.where(recompute == FULL, dims.hidden * e / shared, per_token)
    return kept


def head_activation_bytes(
    dims: Dims, *, microbatch: Number, tensor: Number, sequence_parallel: Number, vocab: Number
) -> Number:
    """Return the bytes that the last normalisation, the logits (fp32) and the loss keep of one micro-batch."""
    shared = np.where(sequence_parallel, tensor, 1.0)
    kept: Number = microbatch * dims.seq * (4 * dims.hidden / shared + 4 * vocab / tensor)
    return kept
