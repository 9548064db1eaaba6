"""GPT-2's layers: total, causality, initial values, ties and loss."""

import math

import pytest
import torch
from torch import nn

from chimera.models.counting import count_parameters
from chimera.models.gpt import GptConfig, gpt_layers
from chimera.models.losses import LanguageModelLoss


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def tiny(**options):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_positions": 12}
    return GptConfig(**(sizes | options))


def test_64_layer_gpt_2_has_the_papers_number_of_parameters():
    """The GPT-2 of Li & Hoefler, SC'21: an untied head without bias gives 1,389,327,360."""
    config = GptConfig(vocab_size=50257, hidden_size=1280, num_layers=64, num_heads=20, tied_decoder=False)
    with torch.device("meta"):
        assert count_parameters(gpt_layers(config)) == 1_389_327_360


def test_gpt_2_small_has_the_published_number_of_parameters():
    """Radford et al.'s smallest model, head tied, has 124,439,808 parameters."""
    config = GptConfig(vocab_size=50257, hidden_size=768, num_layers=12, num_heads=12)
    with torch.device("meta"):
        assert count_parameters(gpt_layers(config)) == 124_439_808


@pytest.mark.parametrize("attention_dropout", [0.0, 1e-12])
def test_no_position_sees_a_later_one(attention_dropout):
    """Changing a token changes the logits from its position on and none before, on both attention paths."""
    config = tiny(dropout=0.0, attention_dropout=attention_dropout)
    model = nn.Sequential(*gpt_layers(config))
    tokens = torch.randint(50, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 50)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert ((before[:, 7:] - after[:, 7:]).abs().amax(-1) > 0).all()


def test_explicit_attention_equals_the_fused_one_but_for_its_dropout():
    """With a vanishing attention dropout the explicit path gives what the fused one gives."""
    model = nn.Sequential(*gpt_layers(tiny(dropout=0.0, attention_dropout=1e-12)))
    tokens = torch.randint(50, (2, 12))
    torch.testing.assert_close(model(tokens), model.eval()(tokens))


def test_projections_onto_the_residual_stream_start_narrower():
    """GPT-2 divides their deviation by √(2 · layers); all other weights have the configured one."""
    block = gpt_layers(tiny(hidden_size=256, num_layers=8))[1]
    narrow = 0.02 / math.sqrt(16)
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.feed_forward.expand.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attention.output.weight.std().item() == pytest.approx(narrow, rel=0.02)
    assert block.feed_forward.contract.weight.std().item() == pytest.approx(narrow, rel=0.02)


def test_layers_built_on_meta_get_all_their_values_from_reset_parameters():
    """No NaN of fresh storage survives reset_parameters."""
    with torch.device("meta"):
        layers = gpt_layers(tiny(tied_decoder=False))
    for layer in layers:
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.constant_(parameter, float("nan"))
        layer.reset_parameters()
        assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_decoder_holds_the_word_embedding_when_tied():
    """A tied decoder's weight is the embedding's parameter itself."""
    layers = gpt_layers(tiny())
    assert layers[-1].decoder.weight is layers[0].word.weight
    assert layers[-1].decoder.bias is None


def test_loss_sums_log_probabilities_of_the_following_words():
    """The term sums −log p over the labels that are not ignored, and counts them."""
    logits = torch.randn(2, 3, 50)
    target = {"labels": torch.tensor([[4, -100, 9], [-100, 0, -100]])}
    total, count = LanguageModelLoss()(logits, target)["lm"]
    words = logits.log_softmax(-1)
    torch.testing.assert_close(total, -(words[0, 0, 4] + words[0, 2, 9] + words[1, 1, 0]))
    assert LanguageModelLoss().counts(target) == {"lm": 3}
    assert count.item() == 3


def test_no_label_gives_zero_loss_and_zero_gradients():
    """Without any label the term is (0, 0) and backward gives zeros, not NaN."""
    layers = gpt_layers(tiny())
    model = nn.Sequential(*layers)
    target = {"labels": torch.full((2, 12), -100)}
    total, count = LanguageModelLoss()(model(torch.randint(50, (2, 12))), target)["lm"]
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all(parameter.grad.count_nonzero() == 0 for parameter in model.parameters())
