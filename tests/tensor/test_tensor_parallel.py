"""Layers cut over tensor-parallel ranks compute, and learn, what one rank alone does."""

import numpy as np
import pytest
import torch
from tensor_network import Network, loss_and_gradients
from torch.nn import functional

from chimera.errors import UsageError
from chimera.tensor.parallel import ALONE, TensorParallel
from chimera.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear
from chimera.tensor.regions import gather_from_sequence_region, scatter_to_sequence_region
from chimera.tensor.sharding import Sharding, even_segments, sharding_of
from chimera.tensor.vocabulary import Vocabulary, VocabularyEmbedding, padded_vocabulary_size

NUM_WORDS = 300
"""Over two ranks 256 and 44 words; over four 128, 128, 44 and none."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("mode", ["whole", "fused", "split"])
@pytest.mark.parametrize(("t", "sequence"), [(2, False), (2, True), (4, True)])
def test_cut_layers_equal_whole_ones(ranks, t, sequence, mode):
    """Loss, initial weights and all gradients equal those of one rank, however the backward is run."""
    expected = loss_and_gradients(None, NUM_WORDS, 1)
    results = ranks.run(t, loss_and_gradients, NUM_WORDS, t, sequence=sequence, mode=mode)
    for found in results:
        assert found["loss"] == results[0]["loss"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-11, atol=1e-12, err_msg=name)
            if name.startswith("weight"):
                np.testing.assert_array_equal(found[name], value)


def test_a_vocabulary_that_two_does_not_divide_has_the_loss_of_one_rank(ranks):
    """GPT-2's 50,257 words, padded to 50,432 over two ranks: padding neither wins nor enters the softmax."""
    expected = loss_and_gradients(None, 50257, 1)
    for found in ranks.run(2, loss_and_gradients, 50257, 2):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        np.testing.assert_allclose(found["gradient decoder.weight"], expected["gradient decoder.weight"], atol=1e-12)


def test_vocabulary_is_padded_to_a_multiple_of_128_per_rank():
    """The published sizes of Megatron's GPT vocabulary; one rank alone pads nothing."""
    assert [padded_vocabulary_size(50257, t) for t in (1, 2, 8)] == [50304, 50432, 51200]
    cut = [Vocabulary(50257, TensorParallel(rank, 2)) for rank in range(2)]
    assert [(words.first, words.rows, words.num_words_here) for words in cut] == [
        (0, 25216, 25216),
        (25216, 25216, 25041),
    ]
    assert Vocabulary(50257).rows == 50257
    last = Vocabulary(300, TensorParallel(3, 4))
    assert (last.rows, last.num_words_here) == (128, 0)


@pytest.mark.parametrize(("rank", "word"), [(0, -1), (1, 300), (1, 511), (1, 512)])
def test_what_is_no_word_is_refused(rank, word):
    """A number below 0 or beyond the last word, padding included, fails as it does on one rank."""
    embedding = VocabularyEmbedding(Vocabulary(300, TensorParallel(rank, 2)), 4)
    elsewhere, local = embedding._local(torch.tensor([[word]]))
    assert not elsewhere.any()
    with pytest.raises(IndexError):
        functional.embedding(local, embedding.weight)


def test_padding_is_zero_and_stays_out_of_the_whole():
    """Weights beyond the last word are 0; joined parts are the whole again."""
    shapes = [Network(TensorParallel(rank, 2), 300).word.weight for rank in range(2)]
    assert [tuple(part.shape) for part in shapes] == [(256, 6), (256, 6)]
    assert not shapes[1][44:].any()
    sharding = sharding_of(shapes[0])
    whole = sharding.join([part.detach() for part in shapes])
    assert tuple(whole.shape) == (300, 6) == sharding.whole_shape(shapes[0].shape)
    torch.testing.assert_close(whole, Network(ALONE, 300).word.weight.detach(), rtol=0, atol=0)


def test_joined_outputs_are_cut_each_by_itself():
    """Of queries, keys and values in one matrix, every rank has a part of each."""
    parallel = [TensorParallel(rank, 2) for rank in range(2)]
    whole = torch.arange(8.0)
    parts = [Sharding.cut(0, even_segments([4, 2, 2], p), p).take(whole) for p in parallel]
    assert [part.tolist() for part in parts] == [[0, 1, 4, 6], [2, 3, 5, 7]]


def test_widths_that_t_does_not_divide_are_refused():
    """The message says what was got and which numbers of ranks would do."""
    with pytest.raises(UsageError, match=r"= 9 does not divide over t = 2 .* t among 1, 3, 9"):
        ColumnParallelLinear(4, 9, TensorParallel(0, 2))
    with pytest.raises(UsageError, match="= 9 does not divide over t = 2"):
        RowParallelLinear(9, 4, TensorParallel(0, 2))
    with pytest.raises(UsageError, match=r"the sequence length = 7 does not divide over t = 2"):
        scatter_to_sequence_region(torch.zeros(1, 7, 4), TensorParallel(0, 2, sequence=True))


def refuse_sizes(group):
    with pytest.raises(UsageError, match=r"t = 3 .* do not divide the 4 ranks of the run; take a t among 1, 2, 4"):
        TensorParallel.join(group, 3)
    place = TensorParallel.join(group, 2, timeout_s=20.0)
    together = place.start_sum(torch.tensor(float(group.rank()))).wait()
    return place.rank, float(together)


def test_adjacent_ranks_share_their_layers(ranks):
    """Ranks 0 and 1 are one group, 2 and 3 another; a t that does not divide the ranks is refused."""
    assert ranks.run(4, refuse_sizes) == [(0, 1.0), (1, 1.0), (0, 5.0), (1, 5.0)]


def there_and_back(group):
    """Scatter and gather a sequence; return what comes out and the gradient of what went in."""
    parallel = TensorParallel.join(group, 2, sequence=True, timeout_s=20.0)
    whole = torch.arange(24.0).view(2, 4, 3).requires_grad_()
    part = scatter_to_sequence_region(whole, parallel)
    again = gather_from_sequence_region(part, parallel)
    (again * torch.arange(4.0).view(1, 4, 1)).sum().backward()
    return part.detach().numpy(), again.detach().numpy(), whole.grad.numpy()


def test_a_sequence_is_scattered_and_gathered(ranks):
    """Each rank has its half of the positions of every sample; values and gradients come back whole."""
    whole = np.arange(24.0).reshape(2, 4, 3)
    for rank, (part, again, gradient) in enumerate(ranks.run(2, there_and_back)):
        np.testing.assert_array_equal(part, whole[:, 2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(again, whole)
        np.testing.assert_array_equal(gradient, np.broadcast_to(np.arange(4.0).reshape(1, 4, 1), (2, 4, 3)))


def test_one_rank_alone_is_an_ordinary_linear_layer():
    """Without anybody to share with, both layers compute bit for bit as nn.Linear does."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    for layer in (ColumnParallelLinear(4, 6), RowParallelLinear(4, 6)):
        assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
        assert not sharding_of(layer.weight).is_cut
