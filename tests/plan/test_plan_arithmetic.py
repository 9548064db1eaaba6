"""Parameters, operations and activation bytes against the published formulas, to the digit."""

import pytest

from chimera.errors import ConfigError
from chimera.plan.activations import RECOMPUTE_CODES, block_activation_bytes
from chimera.plan.dims import dims_of
from chimera.plan.flops import step_flops
from chimera.plan.parameters import block_parameters, model_parameters, padded_vocab
from chimera.plan.shape import ModelShape

GPT3 = ModelShape(family="gpt", hidden=12288, layers=96, heads=96, vocab=51200, seq=2048)
LLAMA = {"family": "llama", "hidden": 4096, "layers": 32, "heads": 32, "gated": True, "seq": 4096, "tied": False}
PUBLISHED = {
    "Bert-48": (
        ModelShape(family="bert", hidden=1024, layers=48, heads=16, vocab=30522, seq=128, positions=512, tied=False),
        669_790_012,
    ),
    "GPT-2 of Chimera": (
        ModelShape(family="gpt", hidden=1280, layers=64, heads=20, vocab=50257, seq=1024, tied=False),
        1_389_327_360,
    ),
    "gpt2": (ModelShape(family="gpt", hidden=768, layers=12, heads=12, vocab=50257, seq=1024), 124_439_808),
    "t5-small": (
        ModelShape(family="t5", hidden=512, layers=6, encoder_layers=6, heads=8, vocab=32128, seq=512),
        60_506_624,
    ),
    "t5-base": (
        ModelShape(family="t5", hidden=768, layers=12, encoder_layers=12, heads=12, vocab=32128, seq=512),
        222_903_552,
    ),
    "Llama-2-7B": (ModelShape(**LLAMA, ffn=11008, vocab=32000), 6_738_415_616),
    "Llama-3-8B": (ModelShape(**LLAMA, ffn=14336, vocab=128256, kv_heads=8), 8_030_261_248),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_their_published_parameters(name):
    """Every family's parameters come out to the last digit."""
    shape, count = PUBLISHED[name]
    assert model_parameters(shape) == count


def test_a_gpt_block_has_twelve_h_squared_and_thirteen_h_parameters():
    """Narayanan et al. 2021, §5.1."""
    h = GPT3.hidden
    assert block_parameters(dims_of(GPT3)[0]).total == 12 * h * h + 13 * h


def test_the_vocabulary_is_padded_to_128_times_t():
    """Megatron-LM's rule."""
    assert [padded_vocab(50257, t, 128) for t in (1, 2, 8)] == [50304, 50432, 51200]


def test_operations_follow_the_published_formulas():
    """72 B l s h² (1 + s/6h + V/12lh) of the model, 96 … V/16lh with full recomputation."""
    h, layers, s, vocab = 12288, 96, 2048, 51200
    model = 72 * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    hardware = 96 * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert step_flops(GPT3, global_batch=3) == pytest.approx(3 * model, rel=1e-15)
    assert step_flops(GPT3, global_batch=3, recompute="full") == pytest.approx(3 * hardware, rel=1e-15)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "terms"),
    [
        ("none", 0, (10, 24, 5)),
        ("none", 1, (0, 34, 5)),
        ("selective", 0, (10, 24, 0)),
        ("selective", 1, (0, 34, 0)),
        ("full", 0, (2, 0, 0)),
        ("full", 1, (0, 2, 0)),
    ],
)
@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_follow_korthikanti(recompute, sequence_parallel, terms, tensor):
    """Korthikanti et al. 2022, table 2: s b h (whole + shared/t + scores · a s/(h t))."""
    whole, shared, scores = terms
    kept = block_activation_bytes(
        dims_of(GPT3)[0],
        microbatch=2,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        recompute=RECOMPUTE_CODES[recompute],
    )
    per_element = whole + shared / tensor + scores * 96 * 2048 / (12288 * tensor)
    assert kept == pytest.approx(2 * 2048 * 12288 * per_element, rel=1e-15)


@pytest.mark.parametrize(
    "wrong",
    [{"family": "mamba"}, {"heads": 7}, {"kv_heads": 5}, {"layers": 0}, {"encoder_layers": 2}, {"decoder_seq": 8}],
)
def test_impossible_models_are_refused(wrong):
    """The message names what cannot be."""
    sizes = {"family": "gpt", "hidden": 768, "layers": 2, "heads": 12, "vocab": 100, "seq": 8, **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "[-_]")):
        ModelShape(**sizes)
