"""BERT's weights under transformers' names: equal outputs, both directions, and refusals."""

import importlib
import warnings

import pytest
import torch
from torch import nn

from chimera.errors import CheckpointError
from chimera.models.bert import BertConfig, BertPretrainingLoss, bert_layers
from chimera.models.huggingface import from_huggingface, to_huggingface

CONFIG = BertConfig(vocab_size=60, hidden_size=32, num_layers=3, num_heads=4, intermediate_size=48, max_positions=20)
UNTIED = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    intermediate_size=48,
    max_positions=20,
    tied_decoder=False,
)


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says about itself on import is not ours
        try:
            return importlib.import_module("transformers")
        except ModuleNotFoundError:
            pytest.skip("transformers is not installed (dependency group 'parity')")


def peer(transformers, config):
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tied_decoder,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():  # large, and no bias or scale at its initial value: a mix-up shows
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def weights(config):
    state = nn.Sequential(*bert_layers(config)).state_dict()
    return to_huggingface(state, config)


def random_batch():
    return {
        "input_ids": torch.randint(1, 60, (4, 20)),  # transformers gives the padding word 0 no gradient
        "token_type_ids": torch.randint(2, (4, 20)),
        "attention_mask": torch.ones(4, 20, dtype=torch.long),
    }


def run(model, batch, labels=None):
    hidden = model[0](batch["input_ids"], batch["token_type_ids"])
    for block in list(model)[1:-1]:
        hidden = block(hidden, batch["attention_mask"])
    return model[-1](hidden, labels)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_logits_and_loss_equal_transformers(transformers, config):
    """On the same weights all logits and the loss agree within 1e-5."""
    theirs = peer(transformers, config)
    ours = nn.Sequential(*bert_layers(config)).eval()
    ours.load_state_dict(from_huggingface(theirs.state_dict(), config))
    batch = random_batch()
    batch["attention_mask"][1, 12:] = 0
    labels = torch.where(torch.rand(4, 20) < 0.15, torch.randint(60, (4, 20)), -100)
    sentences = torch.tensor([0, 1, 1, 0])
    with torch.no_grad():
        expected = theirs(**batch, labels=labels, next_sentence_label=sentences)
        words, next_sentence = run(ours, batch)
        terms = BertPretrainingLoss()(run(ours, batch, labels), {"mlm_labels": labels, "nsp_labels": sentences})
    assert expected.prediction_logits.std((0, 1)).min() > 0.2, "positions look alike, which would hide differences"
    torch.testing.assert_close(words, expected.prediction_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(next_sentence, expected.seq_relationship_logits, rtol=0, atol=1e-5)
    loss = sum(total / count for total, count in terms.values())
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)


def test_gradients_equal_transformers(transformers):
    """One backward gives the gradients that transformers gives, within 1e-5 by norm."""
    theirs = peer(transformers, CONFIG)
    ours = nn.Sequential(*bert_layers(CONFIG)).eval()
    ours.load_state_dict(from_huggingface(theirs.state_dict(), CONFIG))
    batch = random_batch()
    labels = torch.where(torch.rand(4, 20) < 0.3, torch.randint(60, (4, 20)), -100)
    sentences = torch.tensor([0, 1, 1, 0])
    theirs(**batch, labels=labels, next_sentence_label=sentences).loss.backward()
    terms = BertPretrainingLoss()(run(ours, batch, labels), {"mlm_labels": labels, "nsp_labels": sentences})
    sum(total / count for total, count in terms.values()).backward()
    named = dict(theirs.named_parameters(remove_duplicate=False))
    expected = from_huggingface({name: parameter.grad for name, parameter in named.items()}, CONFIG)
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - expected[name]).norm() / expected[name].norm().clamp_min(1e-3)
        assert error < 1e-5, name


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_transformers_takes_our_weights_back(transformers, config):
    """Written weights load strictly into BertForPreTraining and read back bitwise."""
    state = nn.Sequential(*bert_layers(config)).state_dict()
    written = to_huggingface(state, config)
    model = peer(transformers, config)
    assert set(written) == set(model.state_dict())
    model.load_state_dict(written)
    again = from_huggingface(model.state_dict(), config)
    assert list(again) != []
    assert {name: torch.equal(tensor, state[name]) for name, tensor in again.items()} == dict.fromkeys(state, True)


def test_names_of_older_files_are_read():
    """LayerNorm.gamma and beta, no prefix, a position_ids buffer and no decoder weight give the same weights."""
    state = weights(CONFIG)
    old = {"embeddings.position_ids": torch.arange(20)[None]}
    for name, tensor in state.items():
        if name in {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}:
            continue
        old_name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[old_name.removeprefix("bert.")] = tensor
    expected, got = from_huggingface(state, CONFIG), from_huggingface(old, CONFIG)
    assert {name: torch.equal(tensor, expected[name]) for name, tensor in got.items()} == dict.fromkeys(expected, True)


def test_an_untied_decoder_takes_the_bias_transformers_computes_with():
    """decoder.bias wins over the unused predictions.bias, which counts where it stands alone, as in older files."""
    state = weights(UNTIED)
    state["cls.predictions.decoder.bias"] = torch.randn(60)
    state["cls.predictions.bias"] = torch.randn(60)
    assert torch.equal(from_huggingface(state, UNTIED)["4.decoder.bias"], state.pop("cls.predictions.decoder.bias"))
    assert torch.equal(from_huggingface(state, UNTIED)["4.decoder.bias"], state["cls.predictions.bias"])


def test_tied_biases_that_differ_are_refused():
    """In a tied model the two names of the decoder's bias are one tensor."""
    state = weights(CONFIG) | {"cls.predictions.bias": torch.randn(60)}
    with pytest.raises(CheckpointError, match=r"decoder\.bias and cls\.predictions\.bias differ"):
        from_huggingface(state, CONFIG)


def test_a_tied_decoder_weight_may_be_left_out_of_ours():
    """named_parameters lists a tied weight once, which is enough to write it."""
    model = nn.Sequential(*bert_layers(CONFIG))
    written = to_huggingface({name: tensor.detach() for name, tensor in model.named_parameters()}, CONFIG)
    assert written["cls.predictions.decoder.weight"] is written["bert.embeddings.word_embeddings.weight"]


def test_missing_and_unknown_names_are_all_named():
    """The error lists what is missing and what has no place."""
    state = weights(CONFIG)
    del state["bert.pooler.dense.bias"]
    state["bert.encoder.layer.3.output.dense.bias"] = torch.zeros(32)
    with pytest.raises(
        CheckpointError,
        match=r"missing: bert\.pooler\.dense\.bias; unknown: bert\.encoder\.layer\.3\.output\.dense\.bias\. Check",
    ):
        from_huggingface(state, CONFIG)


def test_a_missing_decoder_of_an_untied_model_says_how_to_tie_it():
    """Where only tying would give a decoder weight, the option is named."""
    state = weights(UNTIED)
    del state["cls.predictions.decoder.weight"]
    with pytest.raises(CheckpointError, match=r"missing: cls\.predictions\.decoder\.weight; .*tied_decoder = true"):
        from_huggingface(state, UNTIED)


def test_an_untied_decoder_is_not_dropped_for_a_tied_model():
    """Two different tensors for one tied weight are refused, not chosen between, in both directions."""
    with pytest.raises(CheckpointError, match=r"decoder\.weight and .* differ.*tied_decoder = false"):
        from_huggingface(weights(UNTIED), CONFIG)
    with pytest.raises(CheckpointError, match=r"4\.decoder\.weight differ.*tied_decoder = false"):
        to_huggingface(nn.Sequential(*bert_layers(UNTIED)).state_dict(), CONFIG)


def test_two_tensors_for_one_name_are_refused():
    """The old and the new name of one tensor side by side are refused by name."""
    state = weights(CONFIG)
    state["bert.embeddings.LayerNorm.gamma"] = torch.ones(32)
    with pytest.raises(CheckpointError, match=r"two tensors stand for bert\.embeddings\.LayerNorm\.weight"):
        from_huggingface(state, CONFIG)


def test_another_size_is_refused_with_both_shapes():
    """A position table of another length is named with the shape got and the shape needed."""
    state = weights(CONFIG)
    state["bert.embeddings.position_embeddings.weight"] = torch.zeros(24, 32)
    with pytest.raises(CheckpointError, match=r"0\.position\.weight is \[24, 32\], the config needs \[20, 32\]"):
        from_huggingface(state, CONFIG)


def test_our_unknown_names_are_refused_on_writing():
    """A name that is no part of the model is an error, not a silent loss."""
    state = nn.Sequential(*bert_layers(CONFIG)).state_dict() | {"9.extra.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"unknown: 9\.extra\.weight"):
        to_huggingface(state, CONFIG)
