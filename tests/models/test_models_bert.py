"""BERT's layers: shapes, totals, initial values, ties, dropout, masks and losses."""

import pytest
import torch
from torch import nn

from chimera.errors import ConfigError
from chimera.models.bert import BertConfig, BertPretrainingLoss, bert_layers
from chimera.models.counting import count_parameters
from chimera.models.losses import IGNORED_LABEL


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def tiny(**options):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_positions": 12}
    return BertConfig(**(sizes | options))


def batch_of(config, *, samples=3, length=10):
    mlm_labels = torch.full((samples, length), IGNORED_LABEL)
    mlm_labels[0, 2], mlm_labels[2, 9] = 7, 11
    attention_mask = torch.ones(samples, length, dtype=torch.long)
    attention_mask[1, 6:] = 0
    return {
        "input_ids": torch.randint(config.vocab_size, (samples, length)),
        "token_type_ids": torch.randint(config.type_vocab_size, (samples, length)),
        "attention_mask": attention_mask,
        "mlm_labels": mlm_labels,
        "nsp_labels": torch.tensor([0, 1, 0])[:samples],
    }


def run(layers, batch, *, without=()):
    tensors = ()
    for layer in layers:
        named = {name: batch[name] for name in getattr(layer, "fields", ()) if name not in without}
        output = layer(*tensors, **named)
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors


def evaluating(layers):
    return [layer.eval() for layer in layers]


def test_head_decodes_only_labelled_positions_when_labels_are_given():
    """The decoded rows are those of the full logits at the labelled positions, in row order."""
    config = tiny()
    layers, batch = evaluating(bert_layers(config)), batch_of(config)
    some, nsp = run(layers, batch)
    everything, nsp_again = run(layers, batch, without={"mlm_labels"})
    assert some.shape == (2, 50)
    assert everything.shape == (3, 10, 50)
    assert nsp.shape == (3, 2)
    torch.testing.assert_close(some, torch.stack([everything[0, 2], everything[2, 9]]))
    torch.testing.assert_close(nsp, nsp_again)


def test_loss_is_the_same_for_either_form_of_the_logits():
    """Decoding only labelled positions changes no term and no count."""
    config = tiny()
    layers, batch = evaluating(bert_layers(config)), batch_of(config)
    loss = BertPretrainingLoss()
    some = loss(run(layers, batch), batch)
    everything = loss(run(layers, batch, without={"mlm_labels"}), batch)
    for term in ("mlm", "nsp"):
        torch.testing.assert_close(some[term][0], everything[term][0])
        assert some[term][1].item() == everything[term][1].item() == loss.counts(batch)[term]
    assert loss.counts(batch) == {"mlm": 2, "nsp": 3}


def test_loss_sums_log_probabilities_of_the_labels():
    """Each term is the negative log-probability summed over its labels, ignored ones left out."""
    mlm_logits, nsp_logits = torch.randn(2, 50), torch.randn(3, 2)
    target = {"mlm_labels": torch.tensor([[-100, 4], [9, -100]]), "nsp_labels": torch.tensor([1, -100, 0])}
    terms = BertPretrainingLoss()((mlm_logits, nsp_logits), target)
    words, sentences = mlm_logits.log_softmax(-1), nsp_logits.log_softmax(-1)
    torch.testing.assert_close(terms["mlm"][0], -(words[0, 4] + words[1, 9]))
    torch.testing.assert_close(terms["nsp"][0], -(sentences[0, 1] + sentences[2, 0]))
    assert BertPretrainingLoss().counts(target) == {"mlm": 2, "nsp": 2}


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_loss_sums_in_fp32_or_wider(dtype, wide):
    """A sum of bf16 losses is taken in fp32, one of fp64 losses in fp64."""
    config = tiny()
    layers, batch = [layer.to(dtype) for layer in bert_layers(config)], batch_of(config)
    terms = BertPretrainingLoss()(run(layers, batch), batch)
    assert {total.dtype for total, _ in terms.values()} == {wide}


def test_no_labelled_position_gives_zero_loss_and_zero_gradients():
    """Without any label both terms are (0, 0), and backward reaches every parameter with a gradient of 0."""
    config = tiny()
    layers, batch = bert_layers(config), batch_of(config)
    batch["mlm_labels"].fill_(IGNORED_LABEL)
    batch["nsp_labels"].fill_(IGNORED_LABEL)
    for without in ((), ("mlm_labels",)):
        terms = BertPretrainingLoss()(run(layers, batch, without=without), batch)
        assert [(total.item(), int(count)) for total, count in terms.values()] == [(0.0, 0), (0.0, 0)]
        (terms["mlm"][0] + terms["nsp"][0]).backward()
        gradients = {name: parameter.grad for name, parameter in nn.Sequential(*layers).named_parameters()}
        assert [name for name, gradient in gradients.items() if gradient is None or gradient.count_nonzero() > 0] == []


def test_every_parameter_gets_a_gradient():
    """No parameter stands outside the graph of the loss."""
    config = tiny(tied_decoder=False)
    layers, batch = bert_layers(config), batch_of(config)
    terms = BertPretrainingLoss()(run(layers, batch), batch)
    (terms["mlm"][0] + terms["nsp"][0]).backward()
    gradients = {name: parameter.grad for name, parameter in nn.Sequential(*layers).named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None or gradient.count_nonzero() == 0] == []


def test_padding_changes_no_output_at_real_tokens():
    """A padded sequence gives what the same sequence gives without its padding."""
    config = tiny()
    layers, batch = evaluating(bert_layers(config)), batch_of(config)
    padded, padded_nsp = run(layers, batch, without={"mlm_labels"})
    short = {name: batch[name][1:2, :6] for name in ("input_ids", "token_type_ids")}
    alone, alone_nsp = run(layers, batch | short, without={"mlm_labels", "attention_mask"})
    torch.testing.assert_close(padded[1, :6], alone[0])
    torch.testing.assert_close(padded_nsp[1], alone_nsp[0])


def test_a_sequence_without_real_tokens_gives_finite_numbers_with_and_without_attention_dropout():
    """Hiding every position of a sequence gives no NaN on either path through attention."""
    config = tiny()
    layers, batch = bert_layers(config), batch_of(config)
    batch["attention_mask"][1] = 0
    assert all(tensor.isfinite().all() for tensor in run(layers, batch))
    assert all(tensor.isfinite().all() for tensor in run(evaluating(layers), batch))


def test_an_attention_mask_of_ones_is_no_mask():
    """A mask that hides nothing gives bitwise what no mask gives."""
    config = tiny()
    layers, batch = evaluating(bert_layers(config)), batch_of(config)
    batch["attention_mask"].fill_(1)
    assert torch.equal(run(layers, batch)[0], run(layers, batch, without={"attention_mask"})[0])


def test_absent_token_types_are_type_zero():
    """Leaving token_type_ids out gives bitwise what zeros give."""
    config = tiny()
    layers, batch = evaluating(bert_layers(config)), batch_of(config)
    batch["token_type_ids"].zero_()
    assert torch.equal(run(layers, batch)[0], run(layers, batch, without={"token_type_ids"})[0])


@pytest.mark.parametrize("options", [{}, {"attention_dropout": 0.0}, {"dropout": 0.0}])
def test_dropout_follows_the_default_generator(options):
    """The same seed gives the same output bitwise, another seed another output."""
    config = tiny(**options)
    layers, batch = bert_layers(config), batch_of(config)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(run(layers, batch)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_without_dropout_training_and_evaluation_agree():
    """With both probabilities 0 the output draws nothing and is that of evaluation."""
    config = tiny(dropout=0.0, attention_dropout=0.0)
    layers, batch = bert_layers(config), batch_of(config)
    state = torch.get_rng_state()
    trained = run(layers, batch)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(trained, run(evaluating(layers), batch)[0])


def test_explicit_attention_equals_the_fused_one_but_for_its_dropout():
    """With a vanishing attention dropout the explicit path gives what the fused one gives, mask included."""
    options = {"dropout": 0.0, "attention_dropout": 1e-12}
    layers, batch = bert_layers(tiny(**options)), batch_of(tiny())
    torch.testing.assert_close(run(layers, batch)[0], run(evaluating(layers), batch)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_decoder_holds_the_word_embedding_when_tied(tied):
    """A tied decoder's weight is the embedding's parameter itself; the total counts it once."""
    config = tiny(tied_decoder=tied)
    layers = bert_layers(config)
    named = dict(nn.Sequential(*layers).named_parameters(remove_duplicate=False))
    assert (named["3.decoder.weight"] is named["0.word.weight"]) is tied
    untied_total = sum(parameter.numel() for parameter in named.values())
    assert count_parameters(layers) == untied_total - (50 * 16 if tied else 0)


def test_layers_built_on_meta_get_all_their_values_from_reset_parameters():
    """A layer alone, given storage full of NaN, holds the right distribution after reset_parameters."""
    config = tiny(vocab_size=1000, hidden_size=128, num_layers=1, max_positions=128, tied_decoder=False)
    with torch.device("meta"):
        layers = bert_layers(config)
    for layer in layers:
        assert {tensor.device.type for tensor in layer.parameters()} == {"meta"}
        assert list(layer.buffers()) == []
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.constant_(parameter, float("nan"))
        layer.reset_parameters()
        for name, parameter in layer.named_parameters():
            if parameter.ndim == 2:
                # The two-row tables hold 256 values: their deviation has an error of 1 / sqrt(2 * 256) = 4.4 %.
                assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name
                assert abs(parameter.mean().item()) < 0.006, name
            else:
                constant = 1.0 if "norm.weight" in name else 0.0
                assert torch.equal(parameter, torch.full_like(parameter, constant)), name


def test_reset_parameters_depends_on_the_seed_alone():
    """The same seed gives the same values however often a layer was reset before."""
    block = bert_layers(tiny())[1]
    values = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        block.reset_parameters()
        values.append(block.attention.qkv.weight.detach().clone())
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_resetting_the_head_leaves_a_tied_weight_to_the_embeddings():
    """One layer draws a tied weight, so it does not depend on which layers a process holds."""
    layers = bert_layers(tiny())
    word = layers[0].word.weight
    before, transform = word.detach().clone(), layers[-1].transform.weight.detach().clone()
    layers[-1].reset_parameters()
    assert torch.equal(word, before)
    assert not torch.equal(layers[-1].transform.weight, transform)
    layers[0].reset_parameters()
    assert not torch.equal(word, before)


def test_bert_48_has_the_papers_number_of_parameters():
    """Bert-48 of Li & Hoefler, SC'21: an untied decoder with one bias per word gives 669,790,012."""
    config = BertConfig(vocab_size=30522, hidden_size=1024, num_layers=48, num_heads=16, tied_decoder=False)
    with torch.device("meta"):
        assert count_parameters(bert_layers(config)) == 669_790_012


def test_bert_base_has_the_published_number_of_parameters():
    """bert-base-uncased for pre-training, decoder tied, has 110,106,428 parameters."""
    config = BertConfig(vocab_size=30522, hidden_size=768, num_layers=12, num_heads=12)
    with torch.device("meta"):
        assert count_parameters(bert_layers(config)) == 110_106_428


def test_a_sequence_over_the_position_table_is_refused_by_option():
    """A sequence of 13 tokens in a model of 12 positions names the option and the value to set."""
    config = tiny()
    with pytest.raises(ConfigError, match=r"13 tokens does not fit \[model\] max_positions = 12.* at least 13"):
        bert_layers(config)[0](torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 18}, r"hidden_size = 18 .* num_heads = 4 .* hidden_size = 16 or 20"),
        ({"hidden_size": 3}, r"hidden_size = 3 .* try hidden_size = 4,"),
        ({"vocab_size": 0}, r"vocab_size = 0 must be a whole number"),
        ({"num_layers": 2.5}, r"num_layers = 2.5 must be a whole number"),
        ({"num_heads": True}, r"num_heads = True must be a whole number"),
        ({"max_positions": -1}, r"max_positions = -1"),
        ({"type_vocab_size": 0}, r"type_vocab_size = 0"),
        ({"intermediate_size": 0}, r"intermediate_size = 0 .*leave it out"),
        ({"dropout": 1.0}, r"dropout = 1.0 is no probability"),
        ({"attention_dropout": float("nan")}, r"attention_dropout = nan"),
        ({"initializer_range": 0.0}, r"initializer_range = 0.0"),
        ({"layer_norm_eps": float("inf")}, r"layer_norm_eps = inf"),
    ],
)
def test_a_size_that_cannot_be_built_is_refused_by_option(options, message):
    """Every wrong option is named with its section and value."""
    with pytest.raises(ConfigError, match=r"\[model\] " + message):
        tiny(**options)


def test_feed_forward_width_is_four_times_the_hidden_size_unless_given():
    """intermediate_size None means 4·h, and a given one is used."""
    assert bert_layers(tiny())[1].feed_forward.expand.weight.shape == (64, 16)
    assert bert_layers(tiny(intermediate_size=24))[1].feed_forward.expand.weight.shape == (24, 16)
