"""What each layer of a model costs, in multiplications of its forward for one sample; by them a model is cut.

Only proportions matter. Embeddings look up and normalise: some 10·s·h simple operations. Knows configurations, and
neither schedules nor devices.
"""

from chimera.data import DataConfig
from chimera.data.t5_samples import span_lengths
from chimera.models import BertConfig, GptConfig, LlamaConfig, T5Config
from chimera.models.config import TransformerConfig

__all__ = ["bert_layer_costs", "gpt_layer_costs", "ict_layer_costs", "llama_layer_costs", "t5_layer_costs"]


def bert_layer_costs(model: BertConfig, data: DataConfig) -> tuple[float, ...]:
    """Return the costs of embeddings, blocks and head, which decodes the masked positions only.

    The head multiplies h² for the transform and h·V for the words at each masked position, and pools one position.

    >>> model = BertConfig(vocab_size=1000, hidden_size=64, num_layers=2, num_heads=2)
    >>> bert_layer_costs(model, DataConfig(sequence_length=100))
    (64000.0, 6195200.0, 6195200.0, 1025664.0)
    """
    s, h = data.sequence_length, model.hidden_size
    masked = max(1, round(data.mlm_probability * s))
    head = float(masked * (h * h + h * model.vocab_size) + h * h + 2 * h)
    return (_embeddings(model, s), *[_block(model, s)] * model.num_layers, head)


def gpt_layer_costs(model: GptConfig, data: DataConfig) -> tuple[float, ...]:
    """Return the costs of embeddings, blocks and head, which decodes every position."""
    s = data.sequence_length
    return (_embeddings(model, s), *[_block(model, s)] * model.num_layers, _decoder(model, s))


def llama_layer_costs(model: LlamaConfig, data: DataConfig) -> tuple[float, ...]:
    """Return the costs of embeddings, blocks, whose feed-forward has three matrices, and head."""
    s = data.sequence_length
    return (_embeddings(model, s), *[_block(model, s, gated=True)] * model.num_layers, _decoder(model, s))


def t5_layer_costs(model: T5Config, data: DataConfig) -> tuple[float, ...]:
    """Return the costs of both stacks; decoder blocks look at the encoder's output too.

    >>> model = T5Config(vocab_size=1000, hidden_size=64, num_layers=1, num_heads=2)
    >>> [round(cost / 64) for cost in t5_layer_costs(model, DataConfig(samples="t5", sequence_length=100))]
    [1000, 96800, 220, 37880, 22000]
    """
    _, noise, spans = span_lengths(data.sequence_length, data.mlm_probability, data.mean_span_length)
    s, target = data.sequence_length, noise + spans + 1
    width = model.num_heads * model.head_size
    crossing = 2.0 * model.hidden_size * width * (target + s) + 2.0 * target * s * width
    return (
        _embeddings(model, s),
        *[_block(model, s, gated=model.gated)] * model.num_layers,
        _embeddings(model, target),
        *[_block(model, target, gated=model.gated) + crossing] * model.num_decoder_blocks,
        _decoder(model, target),
    )


def ict_layer_costs(model: BertConfig, data: DataConfig) -> tuple[float, ...]:
    """Return the costs of both encoders, the one of short queries first."""
    query, block = ((_embeddings(model, s), _block(model, s)) for s in (data.query_length, data.sequence_length))
    return (
        query[0],
        *[query[1]] * model.num_layers,
        block[0],
        *[block[1]] * model.num_layers,
        float(model.hidden_size),
    )


def _embeddings(model: TransformerConfig, length: int) -> float:
    return 10.0 * length * model.hidden_size


def _block(model: TransformerConfig, length: int, *, gated: bool = False) -> float:
    """Projections of queries and output, of keys and values; scores and mixing; feed-forward."""
    h, width = model.hidden_size, model.num_heads * model.head_size
    projections = 2.0 * length * h * (width + model.key_value_heads * model.head_size)
    return projections + 2.0 * length**2 * width + (3.0 if gated else 2.0) * length * h * model.feed_forward_size


def _decoder(model: TransformerConfig, length: int) -> float:
    return float(length) * model.hidden_size * model.vocab_size
