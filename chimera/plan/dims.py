"""The widths that every formula of the planner takes: a model's, as one number each or as one column each.

The formulas of time and memory are stated once, for numbers and for arrays alike. ``Dims`` is what they see of a model:
floats for one model, columns where many rows (published tables, candidates) are worked out together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chimera.plan.shape import ModelShape

__all__ = ["Dims", "Number", "columns", "dims_of"]

Number: TypeAlias = float | NDArray[np.floating[Any]]
"""One number, or a column of them."""


class Dims(NamedTuple):
    """Widths of one stack of equal blocks.

    Attributes:
        hidden: h.
        heads: a.
        head_width: of one head.
        query: of all queries of a token.
        kv: of all keys of a token; values have as many.
        ffn: of the feed-forward layer.
        inputs: matrices that lead into it, 2 with a gate, else 1.
        seq: tokens of a sequence in this stack.
        cross_seq: tokens that a cross-attention looks at; 0 without one.
        vocab: rows of the word embedding.
        blocks: in this stack.
        biases: 1 where linear layers have biases and normalisations offsets, else 0.
        dropout: 1 where the block drops out activations while training, else 0.
    """

    hidden: Number
    heads: Number
    head_width: Number
    query: Number
    kv: Number
    ffn: Number
    inputs: Number
    seq: Number
    cross_seq: Number
    vocab: Number
    blocks: Number
    biases: Number
    dropout: Number


def dims_of(shape: ModelShape) -> tuple[Dims, ...]:
    """Return the stacks of a model in the order in which data passes them: one, or T5's encoder and decoder."""
    common = Dims(
        hidden=float(shape.hidden),
        heads=float(shape.heads),
        head_width=float(shape.head_width),
        query=float(shape.query_width),
        kv=float(shape.kv_width),
        ffn=float(shape.ffn_width),
        inputs=2.0 if shape.gated else 1.0,
        seq=float(shape.seq),
        cross_seq=0.0,
        vocab=float(shape.vocab),
        blocks=float(shape.layers),
        biases=float(shape.biases),
        dropout=0.0 if shape.family == "llama" else 1.0,
    )
    if shape.family != "t5":
        return (common,)
    encoder = common._replace(blocks=float(shape.encoder_layers))
    return (encoder, common._replace(seq=float(shape.target_seq), cross_seq=float(shape.seq)))


def columns(rows: Sequence[Dims]) -> Dims:
    """Put the widths of many models into columns."""
    return Dims(*(np.array(column, np.float64) for column in zip(*rows, strict=True)))
