"""The bi-encoder: two separate BERTs, and a loss among a micro-batch's own blocks."""

import math

import pytest
import torch
from torch import nn

from chimera.errors import ConfigError
from chimera.models.bert import BertConfig, bert_layers
from chimera.models.ict import IctConfig, IctLoss, ict_layers

TINY = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_positions": 12, "dropout": 0.0}
TINY |= {"attention_dropout": 0.0}


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def batch():
    given = {"query_ids": torch.randint(50, (3, 5)), "block_ids": torch.randint(50, (3, 12))}
    masks = {f"{part}_attention_mask": torch.ones_like(given[f"{part}_ids"]) for part in ("query", "block")}
    masks["query_attention_mask"][0, 3:] = 0
    return given | masks


def run(layers, given):
    tensors = ()
    for layer in layers:
        output = layer(*tensors, **{name: given[name] for name in getattr(layer, "fields", ())})
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors


def test_vectors_are_those_of_two_berts():
    """Each encoder gives what a BERT with its weights gives at the first position, queries divided by √h."""
    layers, given = ict_layers(IctConfig(**TINY)), batch()
    query, block = run(layers, given)
    for part, first, got in (("query", 0, query * 4.0), ("block", 3, block)):
        bert = bert_layers(BertConfig(**TINY))[:-1]
        nn.Sequential(*bert).load_state_dict(nn.Sequential(*layers[first : first + 3]).state_dict())
        hidden = bert[0](given[f"{part}_ids"])
        for layer in bert[1:]:
            hidden = layer(hidden, given[f"{part}_attention_mask"])
        torch.testing.assert_close(got, hidden[:, 0])


def test_the_two_encoders_share_nothing():
    """No parameter is in both."""
    layers = ict_layers(IctConfig(**TINY))
    query, block = ({id(p) for layer in part for p in layer.parameters()} for part in (layers[:3], layers[3:]))
    assert not query & block
    assert len(query) == len(block)


def test_negatives_are_the_other_blocks_of_the_micro_batch():
    """The loss is −log softmax of a query's own block among all; the number right counts queries that score it best."""
    query, block = torch.randn(3, 4), torch.randn(3, 4)
    target = {"query_ids": torch.zeros(3, 7)}
    total, count = IctLoss()((query, block), target)["retrieval"]
    scores = query @ block.T
    torch.testing.assert_close(total, -scores.log_softmax(-1).diagonal().sum())
    assert (count.item(), IctLoss().counts(target)) == (3, {"retrieval": 3})
    assert IctLoss().num_right((query, block), target) == sum(int(row.argmax()) == n for n, row in enumerate(scores))
    assert IctLoss()((query[:1], block[:1]), {"query_ids": torch.zeros(1, 7)})["retrieval"][0].item() == 0.0


def test_equal_vectors_cost_the_logarithm_of_the_micro_batch():
    """Where nothing tells blocks apart, a query costs log b nats."""
    total, _ = IctLoss()((torch.ones(4, 2), torch.ones(4, 2)), {"query_ids": torch.zeros(4, 7)})["retrieval"]
    assert total.item() == pytest.approx(4 * math.log(4))


def test_there_is_no_decoder_to_tie():
    """An option without meaning is refused."""
    with pytest.raises(ConfigError, match="tied_decoder = true has no meaning"):
        IctConfig(**TINY, tied_decoder=True)
