"""Time of one layer for one micro-batch on one rank: a block, the embedding, the head with its loss.

A layer is a list of matrix products, bytes that memory-bound operations move, collectives of its tensor-parallel group
and host operations; ``kernels`` says what each takes. Numbers and columns alike. Nothing here knows pipelines.
"""

from typing import Final, NamedTuple

import numpy as np

from chimera.plan.activations import FULL, SELECTIVE
from chimera.plan.dims import Dims, Number
from chimera.plan.kernels import Rates, alignment, all_reduce_s, host_bound, memory_s, product_s, waiting_s
from chimera.plan.parameters import block_parameters

__all__ = ["LayerTimes", "Sharing", "block_times", "embedding_times", "head_times"]

_BLOCK_FORWARD_OPERATIONS: Final = 24.0
_BLOCK_BACKWARD_OPERATIONS: Final = 48.0
_CORE_OPERATIONS: Final = 5.0
_HEAD_OPERATIONS: Final = (16.0, 20.0)
_EMBEDDING_OPERATIONS: Final = (5.0, 6.0)
"""Host operations, counted in Megatron-LM's layers; those of a backward are the autograd nodes' kernels."""

_LOSS_FORWARD_BYTES: Final = 24.0
_LOSS_BACKWARD_BYTES: Final = 12.0
"""Moved per logit by a loss in fp32: convert, subtract the maximum, exponentiate, sum, divide; then its gradient."""


class Sharing(NamedTuple):
    """How one layer is run: numbers or columns.

    Attributes:
        microbatch: b.
        tensor: t.
        sequence_parallel: 1 or 0.
        recompute: a code of ``activations``.
        matrix_factor: how fast the code base's products are against the device's calibration.
        unaligned_penalty: of a product with an odd width.
        accumulated_bytes: that adding one gradient to those of earlier micro-batches moves.
    """

    microbatch: Number
    tensor: Number
    sequence_parallel: Number
    recompute: Number
    matrix_factor: Number = 1.0
    unaligned_penalty: Number = 2.0
    accumulated_bytes: Number = 0.0


class LayerTimes(NamedTuple):
    """Seconds of one layer: F, I, W; recomputation counts to I. ``collective_s`` is contained in F and I."""

    forward_s: Number
    input_grad_s: Number
    weight_grad_s: Number
    collective_s: Number

    @property
    def backward_s(self) -> Number:
        """Seconds of B."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> Number:
        """Seconds of F and B."""
        return self.forward_s + self.backward_s


def block_times(rates: Rates, dims: Dims, sharing: Sharing, *, fused_attention: bool = False) -> LayerTimes:
    """Return the times of one block."""
    t = sharing.tensor
    products = _block_products(rates, dims, sharing)
    core, core_grad = _core_products(rates, dims, sharing)
    moved = _block_bytes(rates, dims, sharing, fused_attention=fused_attention)
    faster = sharing.matrix_factor
    reduce = all_reduce_s(rates, rates.element_bytes * sharing.microbatch * dims.seq * dims.hidden, t)
    collectives = 2.0 + 1.0 * (dims.cross_seq > 0)
    again = sharing.recompute == FULL
    core_again = sharing.recompute == SELECTIVE

    core_s = core / faster + memory_s(rates, moved.scores, 3)
    forward = products.forward / faster + memory_s(rates, moved.forward, 8) + core_s
    input_grad = (
        (products.input_grad + core_grad) / faster
        + memory_s(rates, moved.backward, 18)
        + memory_s(rates, moved.scores_grad, 3)
    )
    accumulated = block_parameters(dims).per_rank(t) * sharing.accumulated_bytes
    weight_grad = products.weight_grad / faster + accumulated / rates.memory_rate
    recomputed = np.where(again, forward, np.where(core_again, core_s, 0.0))
    operations = _BLOCK_BACKWARD_OPERATIONS + np.where(
        again, _BLOCK_FORWARD_OPERATIONS, np.where(core_again, _CORE_OPERATIONS, 0.0)
    )
    device_backward = input_grad + weight_grad + recomputed
    backward = host_bound(rates, device_backward, operations)
    weights = backward * weight_grad / device_backward
    # A collective makes the ranks wait for each other, so the host gains no lead while it runs.
    exchanged = collectives * (reduce + waiting_s(rates, t))
    # Sequence parallelism gathers the inputs of two products again for their weights' gradients.
    regathered = reduce * (sharing.sequence_parallel > 0)
    return LayerTimes(
        forward_s=host_bound(rates, forward, _BLOCK_FORWARD_OPERATIONS) + exchanged,
        input_grad_s=backward - weights + exchanged * (1.0 + again) + regathered,
        weight_grad_s=weights,
        collective_s=(2.0 + again) * exchanged + regathered,
    )


def embedding_times(rates: Rates, dims: Dims, sharing: Sharing) -> LayerTimes:
    """Return the times of the embedding: it moves bytes, and its tensor-parallel ranks sum their parts."""
    size = sharing.microbatch * dims.seq * dims.hidden
    reduce = all_reduce_s(rates, rates.element_bytes * size, sharing.tensor)
    forward = size * 6 * rates.element_bytes / rates.memory_rate + reduce
    backward = size * 8 * rates.element_bytes / rates.memory_rate
    ahead, back = _EMBEDDING_OPERATIONS
    return LayerTimes(
        forward_s=host_bound(rates, forward, ahead),
        input_grad_s=backward * 0.0,
        weight_grad_s=host_bound(rates, backward, back),
        collective_s=reduce,
    )


def head_times(rates: Rates, dims: Dims, sharing: Sharing, *, vocab: Number, transform: bool = False) -> LayerTimes:
    """Return the times of the head and its loss.

    Args:
        rates: of the cluster.
        dims: of the last stack.
        sharing: how the layer is run; the head never recomputes.
        vocab: words, padding included.
        transform: whether a product of h by h stands before the decoder (BERT).
    """
    t, h = sharing.tensor, dims.hidden
    tokens = sharing.microbatch * dims.seq
    words = vocab / t
    slower = alignment(np.floor(words), sharing.unaligned_penalty) / sharing.matrix_factor
    forward = product_s(rates, tokens, words, h) * slower
    input_grad = product_s(rates, tokens, h, words) * slower
    weight_grad = product_s(rates, words, h, tokens) * slower
    weight_grad = weight_grad + words * h * sharing.accumulated_bytes / rates.memory_rate
    if transform:
        square = product_s(rates, tokens, h, h) / sharing.matrix_factor
        forward, input_grad, weight_grad = forward + square, input_grad + square, weight_grad + square
    reduce = all_reduce_s(rates, rates.element_bytes * tokens * h, t)
    forward = forward + tokens * words * _LOSS_FORWARD_BYTES / rates.memory_rate
    input_grad = input_grad + tokens * words * _LOSS_BACKWARD_BYTES / rates.memory_rate + reduce
    ahead, back = _HEAD_OPERATIONS
    device_backward = input_grad + weight_grad
    backward = host_bound(rates, device_backward, back)
    weights = backward * weight_grad / device_backward
    return LayerTimes(
        forward_s=host_bound(rates, forward, ahead),
        input_grad_s=backward - weights,
        weight_grad_s=weights,
        collective_s=reduce,
    )


class _Products(NamedTuple):
    forward: Number
    input_grad: Number
    weight_grad: Number


def _block_products(rates: Rates, dims: Dims, sharing: Sharing) -> _Products:
    """Return the seconds of a block's products with weights: each forward has one of either gradient."""
    t, h = sharing.tensor, dims.hidden
    tokens = sharing.microbatch * dims.seq
    sizes = [
        (tokens, (dims.query + 2 * dims.kv) / t, h),
        (tokens, h, dims.query / t),
        (tokens, dims.inputs * dims.ffn / t, h),
        (tokens, h, dims.ffn / t),
    ]
    if np.any(dims.cross_seq):
        sizes += [
            (tokens, dims.query / t, h),
            (sharing.microbatch * dims.cross_seq, 2 * dims.kv / t, h),
            (tokens, h, dims.query / t),
        ]
    forward: Number = 0.0
    input_grad: Number = 0.0
    weight_grad: Number = 0.0
    for rows, columns, depth in sizes:
        forward = forward + product_s(rates, rows, columns, depth)
        input_grad = input_grad + product_s(rates, rows, depth, columns)
        weight_grad = weight_grad + product_s(rates, columns, depth, rows)
    return _Products(forward, input_grad, weight_grad)


def _core_products(rates: Rates, dims: Dims, sharing: Sharing) -> tuple[Number, Number]:
    """Return the seconds of scores and of their product with the values, forward and backward."""
    s, width = dims.seq, dims.head_width
    batch = sharing.microbatch * dims.heads / sharing.tensor
    looked_at = [s] + ([dims.cross_seq] if np.any(dims.cross_seq) else [])
    forward: Number = 0.0
    backward: Number = 0.0
    for keys in looked_at:
        scores = product_s(rates, s, keys, width, batch=batch)
        values = product_s(rates, s, width, keys, batch=batch)
        keyed = product_s(rates, keys, width, s, batch=batch)
        forward = forward + scores + values
        backward = backward + scores + values + 2 * keyed
    return forward * rates.attention_slowdown, backward * rates.attention_slowdown


class _Bytes(NamedTuple):
    forward: Number
    scores: Number
    backward: Number
    scores_grad: Number


def _block_bytes(rates: Rates, dims: Dims, sharing: Sharing, *, fused_attention: bool) -> _Bytes:
    """Return the bytes that a block's memory-bound operations read and write, with masks of one byte."""
    e, drop, t = rates.element_bytes, dims.dropout, sharing.tensor
    tokens = sharing.microbatch * dims.seq
    shared = np.where(sharing.sequence_parallel, t, 1.0)
    branches = 2.0 + 1.0 * (dims.cross_seq > 0)
    heads = dims.query + 2 * dims.kv
    # Per branch a normalisation (read, write) and bias, dropout and residual sum (read two, write one and a mask).
    whole = branches * dims.hidden * (2 * e + 3 * e + drop)
    # Activation function; queries, keys, values and the core's result brought into the order of the products.
    inner = (1 + dims.inputs) * e * dims.ffn + 2 * e * heads + 2 * e * dims.query
    # Per branch the gradients of normalisation, dropout and residual sum.
    whole_grad = branches * dims.hidden * (3 * e + drop * (2 * e + 1) + 3 * e)
    inner_grad = (2 + dims.inputs + 1) * e * dims.ffn + 3 * e * heads + 2 * e * dims.query
    per_score = 0.0 if fused_attention else 1.0
    scores = per_score * dims.heads * (dims.seq + dims.cross_seq) / t
    return _Bytes(
        forward=tokens * (whole / shared + inner / t),
        scores=tokens * scores * (2 * e + drop * (2 * e + 1)),
        backward=tokens * (whole_grad / shared + inner_grad / t),
        scores_grad=tokens * scores * (drop * (2 * e + 1) + 3 * e),
    )
