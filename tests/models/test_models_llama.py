"""Llama's layers: published totals, rotation, grouped heads, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from chimera.errors import ConfigError
from chimera.models.attention import SelfAttention
from chimera.models.counting import count_parameters
from chimera.models.llama import LlamaConfig, llama_layers
from chimera.models.rotary import RotaryEmbedding, RotaryScaling
from chimera.tensor.parallel import ALONE, TensorParallel

TINY = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 4}


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        (
            {"vocab_size": 32000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "intermediate_size": 11008},
            6_738_415_616,
        ),
        (
            {"vocab_size": 128256, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "intermediate_size": 14336}
            | {"num_key_value_heads": 8},
            8_030_261_248,
        ),
    ],
    ids=["llama-2-7b", "llama-3-8b"],
)
def test_published_models_have_the_published_number_of_parameters(sizes, total):
    """Llama 2 7B and Llama 3 8B come out to the last digit, and without storage."""
    with torch.device("meta"):
        assert count_parameters(llama_layers(LlamaConfig(**sizes))) == total


def test_scores_depend_on_distance_alone():
    """A query and a key, both moved on by three positions, have the same product."""
    rotary = RotaryEmbedding(head_size=8, theta=100.0)
    query, key = (torch.randn(8, dtype=torch.float64).expand(1, 1, 9, 8) for _ in range(2))
    turned_query, turned_key = rotary.turned(query, key)
    scores = (turned_query @ turned_key.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[:-3, :-3], scores[3:, 3:])
    assert (scores[0] - scores[0, 0]).abs()[1:].min() > 1e-3


def test_low_frequencies_are_stretched_and_high_ones_stay():
    """Llama 3.1: wavelengths above 16 positions become four times as long, those below 4 stay, between is between."""
    scaling = RotaryScaling(factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=16)
    wavelengths = torch.tensor([2.0, 4.0, 8.0, 16.0, 100.0], dtype=torch.float64)
    stretched = 2 * math.pi / scaling.stretched(2 * math.pi / wavelengths)
    torch.testing.assert_close(stretched[[0, 1, 3, 4]], wavelengths[[0, 1, 3, 4]] * torch.tensor([1, 1, 4, 4]))
    assert 8.0 < stretched[2] < 32.0


def test_query_heads_share_keys_and_values_in_order():
    """Heads 0 and 1 use the first key-value head, 2 and 3 the second, on both attention paths."""
    config = LlamaConfig(**TINY, num_key_value_heads=2)
    attention = SelfAttention(config, ALONE, causal=True, bias=False)
    hidden = torch.randn(3, 5, 16)
    query, key, value = attention.qkv(hidden).split([16, 8, 8], dim=-1)
    heads = []
    for head in range(4):
        q = query[..., 4 * head : 4 * head + 4]
        k, v = (tensor[..., 4 * (head // 2) : 4 * (head // 2) + 4] for tensor in (key, value))
        heads.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    expected = attention.output(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(hidden), expected)
    attention.dropout = 1e-12
    torch.testing.assert_close(attention(hidden), expected)


def test_grouped_heads_that_t_does_not_divide_are_refused():
    """Four query heads would do for t = 4; their two key-value heads do not."""
    config = LlamaConfig(**TINY, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"num_key_value_heads = 2 does not divide over .*tensor = 4.*1, 2"):
        llama_layers(config, TensorParallel(0, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads = 3 does not divide num_heads = 4; .* 1, 2, 4",
        ),
        ({"num_heads": 16}, r"heads of 1 elements, which rotary positions cannot pair"),
        ({"rope_theta": 0.0}, r"rope_theta = 0\.0 must be a finite number of at least 1"),
        ({"rope_factor": float("inf")}, r"rope_factor = inf must be a finite number"),
        ({"rope_low_frequency_factor": 4.0}, r"rope_low_frequency_factor = 4\.0 must be above 0 and below"),
        ({"family": "bert"}, r"family = 'bert' does not fit a LlamaConfig"),
    ],
)
def test_sizes_that_make_no_llama_are_refused(options, message):
    """The option is named, and what would do."""
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(**TINY | options)


def test_a_sequence_that_is_too_long_is_refused():
    """Nothing in the layers bounds a sequence, so the option does."""
    layers = llama_layers(LlamaConfig(**TINY, max_positions=8))
    with pytest.raises(ConfigError, match=r"a sequence of 9 tokens does not fit \[model\] max_positions = 8"):
        layers[0](torch.zeros(1, 9, dtype=torch.long))


def test_layers_built_on_meta_get_all_their_values_from_reset_parameters():
    """No NaN of fresh storage survives reset_parameters; scales of norms are 1."""
    with torch.device("meta"):
        layers = llama_layers(LlamaConfig(**TINY))
    for layer in layers:
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.constant_(parameter, float("nan"))
        layer.reset_parameters()
        assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert torch.equal(layers[1].attention_norm.weight, torch.ones(16))
