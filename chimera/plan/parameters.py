"""How many parameters a model has, layer by layer, and how many of them tensor parallelism shares out.

The counts are those of the published models, to the digit: GPT-2 and BERT as in ``chimera.models``, T5 as in
transformers with its relative position biases, Llama with grouped queries and a gated feed-forward layer.
"""

from typing import NamedTuple

from chimera.plan.dims import Dims, Number, dims_of
from chimera.plan.shape import ModelShape

__all__ = [
    "LayerParameters",
    "block_parameters",
    "embedding_parameters",
    "head_parameters",
    "model_parameters",
    "padded_vocab",
]

_RELATIVE_BUCKETS = 32
"""Rows of a T5 table of relative position biases; the first block of each stack has one."""

_TOKEN_TYPES = 2
_NEXT_SENTENCE_CLASSES = 2


class LayerParameters(NamedTuple):
    """Parameters of one layer: ``sharded`` ones are cut over tensor-parallel ranks, ``replicated`` ones are on each."""

    sharded: Number
    replicated: Number

    @property
    def total(self) -> Number:
        """Both together."""
        return self.sharded + self.replicated

    def per_rank(self, tensor: Number) -> Number:
        """Return those on one of ``tensor`` ranks."""
        return self.sharded / tensor + self.replicated


def block_parameters(dims: Dims) -> LayerParameters:
    """Return the parameters of one block.

    12 h² + 13 h for GPT and BERT (Narayanan et al. 2021, §5.1).
    """
    h = dims.hidden
    attention = h * (dims.query + 2 * dims.kv) + dims.query * h
    cross = _where_cross(dims, attention)
    feed_forward = h * dims.ffn * (dims.inputs + 1)
    biases = dims.biases * (dims.query + 2 * dims.kv + dims.ffn * dims.inputs)
    norm = h * (1 + dims.biases)
    norms = 2 * norm + _where_cross(dims, norm)
    return LayerParameters(attention + cross + feed_forward + biases, norms + dims.biases * 2 * h)


def embedding_parameters(shape: ModelShape, *, vocab: int | None = None) -> LayerParameters:
    """Return the parameters in front of the first block; ``vocab`` is the padded number of words where given."""
    h = shape.hidden
    words = (shape.vocab if vocab is None else vocab) * h
    replicated = shape.num_positions * h
    if shape.family == "bert":
        replicated += _TOKEN_TYPES * h + 2 * h
    if shape.family == "t5":
        words += 2 * _RELATIVE_BUCKETS * shape.heads
    return LayerParameters(float(words), float(replicated))


def head_parameters(shape: ModelShape, *, vocab: int | None = None) -> LayerParameters:
    """Return the parameters behind the last block, a tied matrix not counted."""
    h = shape.hidden
    words = shape.vocab if vocab is None else vocab
    sharded = 0 if shape.tied else words * h
    replicated = h * (2 if shape.biases else 1)
    if shape.family == "t5":
        replicated += h  # of the encoder's own last normalisation
    if shape.family == "bert":
        pooler = h * h + h
        next_sentence = _NEXT_SENTENCE_CLASSES * (h + 1)
        transform = h * h + h
        sharded += words  # the decoder's bias
        # The last normalisation of a BERT is its transform's.
        replicated += pooler + next_sentence + transform
    return LayerParameters(float(sharded), float(replicated))


def model_parameters(shape: ModelShape) -> int:
    """Return the parameters of a whole model, a tied one counted once.

    >>> model_parameters(ModelShape(family="gpt", hidden=1280, layers=64, heads=20, vocab=50257, seq=1024, tied=False))
    1389327360
    """
    blocks = sum(float(dims.blocks * block_parameters(dims).total) for dims in dims_of(shape))
    return round(float(embedding_parameters(shape).total) + blocks + float(head_parameters(shape).total))


def padded_vocab(vocab: int, tensor: int, multiple: int) -> int:
    """Return the rows of the word embedding after padding to a multiple of ``multiple`` times ``tensor`` ranks.

    >>> [padded_vocab(50257, tensor, 128) for tensor in (1, 2, 8)]
    [50304, 50432, 51200]
    """
    step = multiple * tensor
    return -(-vocab // step) * step


def _where_cross(dims: Dims, value: Number) -> Number:
    """Return ``value`` where the blocks have a cross-attention, else 0."""
    return value * (dims.cross_seq > 0)
