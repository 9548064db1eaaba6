"""Floating-point operations of a step: what the model needs, and what the device does when it recomputes.

A multiplication with its addition counts 2; a backward is twice its forward; only matrix products count. For GPT these
are the published formulas: 72 B l s h² (1 + s/6h + V/12lh) without recomputation (Korthikanti et al. 2022, appendix A),
96 B l s h² (1 + s/6h + V/16lh) where blocks run their forward twice (Narayanan et al. 2021, §3.5).
"""

from chimera.plan.dims import Dims, Number, dims_of
from chimera.plan.layout import Recompute
from chimera.plan.shape import ModelShape

__all__ = ["block_flops", "core_flops", "head_flops", "step_flops"]


def core_flops(dims: Dims) -> Number:
    """Return the forward of attention scores and their product with the values, for one sequence."""
    return 4 * dims.seq * (dims.seq + dims.cross_seq) * dims.query


def block_flops(dims: Dims) -> Number:
    """Return the forward of one block for one sequence."""
    h = dims.hidden
    attention = h * (dims.query + 2 * dims.kv) + dims.query * h
    cross = (2 * h * dims.query * dims.seq + 2 * h * dims.kv * dims.cross_seq) * (dims.cross_seq > 0)
    return 2 * dims.seq * (attention + h * dims.ffn * (dims.inputs + 1)) + 2 * cross + core_flops(dims)


def head_flops(shape: ModelShape, *, vocab: int | None = None) -> float:
    """Return the forward of the head for one sequence."""
    h = shape.hidden
    transform = h * h if shape.family == "bert" else 0
    return 2.0 * shape.target_seq * (h * (shape.vocab if vocab is None else vocab) + transform)


def step_flops(shape: ModelShape, *, global_batch: int, recompute: Recompute = "none") -> float:
    """Return the operations of a step of ``global_batch`` sequences; the model's own with ``recompute`` "none".

    >>> gpt = ModelShape(family="gpt", hidden=12288, layers=96, heads=96, vocab=51200, seq=2048)
    >>> h, l, s, V = 12288, 96, 2048, 51200
    >>> round(step_flops(gpt, global_batch=1) / (72 * l * s * h**2 * (1 + s / (6 * h) + V / (12 * l * h))), 12)
    1.0
    """
    again = 0.0
    forward = head_flops(shape)
    for dims in dims_of(shape):
        forward += float(dims.blocks * block_flops(dims))
        if recompute == "full":
            again += float(dims.blocks * block_flops(dims))
        elif recompute == "selective":
            again += float(dims.blocks * core_flops(dims))
    return global_batch * (3 * forward + again)
