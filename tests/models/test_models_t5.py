"""T5's layers: published total, what is shared, initial values, and who sees whom."""

import math

import pytest
import torch
from models_peers import run
from torch import nn

from chimera.errors import ConfigError
from chimera.models.counting import count_parameters
from chimera.models.relative_bias import RelativeBias
from chimera.models.t5 import T5Config, t5_layers
from chimera.tensor.parallel import ALONE

TINY = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 4}


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def test_t5_base_has_the_published_number_of_parameters():
    """T5-base, embeddings and head tied, has 222,903,552 parameters."""
    config = T5Config(vocab_size=32128, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072)
    with torch.device("meta"):
        assert count_parameters(t5_layers(config)) == 222_903_552


def test_one_table_of_biases_per_stack_and_one_of_words():
    """Blocks of a stack hold the same parameter; embeddings, bridge and head hold the words."""
    layers = t5_layers(T5Config(**TINY))
    encoder, decoder = layers[1:3], layers[4:6]
    assert encoder[0].relative_bias.weight is encoder[1].relative_bias.weight
    assert decoder[0].relative_bias.weight is decoder[1].relative_bias.weight
    assert encoder[0].relative_bias.weight is not decoder[0].relative_bias.weight
    assert layers[0].word.weight is layers[3].word.weight is layers[-1].decoder.weight


def batch():
    return {
        "input_ids": torch.randint(50, (2, 10)),
        "attention_mask": torch.ones(2, 10, dtype=torch.long),
        "decoder_input_ids": torch.randint(50, (2, 7)),
    }


@pytest.mark.parametrize("attention_dropout", [0.0, 1e-12])
def test_the_decoder_sees_no_later_position_and_all_of_the_encoder(attention_dropout):
    """A word changed in the target moves nothing before it; one in the source moves everything."""
    layers = t5_layers(T5Config(**TINY, dropout=0.0, attention_dropout=attention_dropout))
    given = batch()
    before = run(layers, given)
    later = given | {"decoder_input_ids": given["decoder_input_ids"].clone()}
    later["decoder_input_ids"][:, 4] = (later["decoder_input_ids"][:, 4] + 1) % 50
    after = run(layers, later)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert ((before[:, 4:] - after[:, 4:]).abs().amax(-1) > 0).all()
    source = given | {"input_ids": given["input_ids"].clone()}
    source["input_ids"][:, 9] = (source["input_ids"][:, 9] + 1) % 50
    assert ((before - run(layers, source)).abs().amax(-1) > 0).all()


def test_padding_of_the_encoder_is_not_looked_at():
    """What stands under a mask of 0 changes nothing, neither in the encoder nor from the decoder."""
    layers = t5_layers(T5Config(**TINY, dropout=0.0, attention_dropout=0.0))
    given = batch()
    given["attention_mask"][0, 6:] = 0
    other = given | {"input_ids": given["input_ids"].clone()}
    other["input_ids"][0, 6:] = (other["input_ids"][0, 6:] + 1) % 50
    torch.testing.assert_close(run(layers, given), run(layers, other), rtol=0, atol=0)


def test_distances_fall_into_the_published_classes():
    """Four classes before a causal query up to a distance of 6: 0, 1, then logarithmic; hidden ones are −∞."""
    table = RelativeBias(1, ALONE, num_classes=4, max_distance=6, causal=True)
    with torch.no_grad():
        table.weight.copy_(torch.arange(4.0)[:, None])
    last = table(9)[0, 0]
    assert last[8].tolist() == [3, 3, 3, 3, 3, 2, 2, 1, 0]
    assert last[0].tolist() == [0, *[-math.inf] * 8]


def test_initial_values_follow_the_widths():
    """Queries 1/√(h·k), keys 1/√h, what leaves the feed-forward 1/√f, words 1: as T5's authors have it."""
    config = T5Config(**TINY | {"hidden_size": 256, "num_heads": 8}, key_value_size=64, intermediate_size=1024)
    layers = t5_layers(config)
    block = layers[-2]
    query, key, _ = block.attention.qkv.weight.split(8 * 64)
    assert query.std().item() == pytest.approx(1 / math.sqrt(256 * 64), rel=0.02)
    assert key.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert block.cross_attention.query.weight.std().item() == pytest.approx(1 / math.sqrt(256 * 64), rel=0.02)
    assert block.attention.output.weight.std().item() == pytest.approx(1 / math.sqrt(512), rel=0.02)
    assert block.feed_forward.contract.weight.std().item() == pytest.approx(1 / 32, rel=0.02)
    assert layers[0].word.weight.std().item() == pytest.approx(1.0, rel=0.02)


def test_layers_built_on_meta_get_all_their_values_from_reset_parameters():
    """No NaN of fresh storage survives but in what other layers own and draw: words and biases that are shared."""
    with torch.device("meta"):
        layers = t5_layers(T5Config(**TINY, tied_decoder=False))
    model = nn.Sequential(*layers).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    for layer in layers:
        layer.reset_parameters()
    left = {name for name, parameter in model.named_parameters() if not parameter.isfinite().all()}
    assert left == {"2.relative_bias.weight", "3.word.weight", "5.relative_bias.weight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relative_buckets": 6}, r"relative_buckets = 6 .* multiple of 4"),
        ({"relative_max_distance": 16}, r"relative_max_distance = 16 give no classes"),
        ({"num_heads": 3}, r"hidden_size = 16 does not divide into num_heads = 3"),
        ({"num_decoder_layers": 0}, r"num_decoder_layers = 0 must be"),
    ],
)
def test_sizes_that_make_no_t5_are_refused(options, message):
    """The option is named, and what would do; heads of their own size need not divide the width."""
    with pytest.raises(ConfigError, match=message):
        T5Config(**TINY | options)
    T5Config(**TINY | {"num_heads": 3}, key_value_size=5)
