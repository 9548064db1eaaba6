import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.data import (
    BertSamples,
    MicrobatchSource,
    TokenizedDocuments,
    Vocabulary,
    evaluation_microbatches,
    token_counts,
    unigram_cross_entropy,
    unigram_entropy,
)
from chimera.errors import ConfigError

VOCABULARY = Vocabulary(20, 0, 1, 2, 3, 4, (0, 1, 2, 3, 4))


def documents_of(*documents):
    return TokenizedDocuments.from_ids(documents, vocab_size=VOCABULARY.size)


def counts_of(*documents):
    return token_counts(documents_of(*documents), VOCABULARY)


@pytest.fixture(scope="module")
def samples():
    words = np.random.default_rng(0).integers(5, 20, (6, 6, 5)).tolist()
    return BertSamples(documents_of(*words), sequence_length=16, seed=0, vocabulary=VOCABULARY)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000), st.data())
def test_a_microbatch_holds_its_samples(samples, size, per_step, step, data):
    """Sample i of micro-batch (step, index) is step·global batch + index·size + i, for any sizes."""
    index = data.draw(st.integers(0, per_step - 1))
    source = MicrobatchSource(samples, size, per_step)
    microbatch = source.microbatch(step, index)
    assert source.global_batch == size * per_step
    assert {tensor.dtype for tensor in microbatch.values()} == {torch.int64}
    assert microbatch["input_ids"].shape == (size, 16)
    assert microbatch["nsp_labels"].shape == (size,)
    for offset in range(size):
        sample = samples[step * size * per_step + index * size + offset]
        assert list(sample) == list(microbatch)
        assert all(np.array_equal(sample[key], microbatch[key][offset]) for key in sample)


def test_the_samples_of_a_step_do_not_depend_on_their_grouping(samples):
    """Twelve samples as three micro-batches of four or six of two are the same twelve."""
    three = [MicrobatchSource(samples, 4, 3).microbatch(2, index)["input_ids"] for index in range(3)]
    six = [MicrobatchSource(samples, 2, 6).microbatch(2, index)["input_ids"] for index in range(6)]
    assert torch.equal(torch.cat(three), torch.cat(six))


def test_evaluation_microbatches_are_the_first_samples(samples):
    """They are the same each time they are made."""
    fixed = evaluation_microbatches(samples, microbatch_size=3, num_microbatches=2)
    again = evaluation_microbatches(samples, microbatch_size=3, num_microbatches=2)
    assert len(fixed) == 2
    assert all(torch.equal(one[key], other[key]) for one, other in zip(fixed, again, strict=True) for key in one)
    assert fixed[1]["input_ids"].tolist() == [samples[index]["input_ids"].tolist() for index in (3, 4, 5)]


def test_places_that_do_not_exist_are_refused(samples):
    """Indices past the step, negative steps, and sizes below one."""
    source = MicrobatchSource(samples, 2, 3)
    for step, index in ((0, 3), (0, -1), (-1, 0)):
        with pytest.raises(IndexError, match="a step has 3"):
            source.microbatch(step, index)
    with pytest.raises(ConfigError, match="microbatch_size is 0"):
        MicrobatchSource(samples, 0, 3)
    with pytest.raises(ConfigError, match="microbatches_per_step is -1"):
        MicrobatchSource(samples, 1, -1)


def test_unigram_entropy_is_that_of_the_ordinary_tokens():
    """Unknown words count for nothing; four equally frequent words have ln 4, shares 1/2, 1/4, 1/4 have 1.5 ln 2."""
    assert unigram_entropy(counts_of([[5, 6, 1], [7, 8, 1]])) == pytest.approx(math.log(4))
    assert unigram_entropy(counts_of([[5, 5], [7, 8]])) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(counts_of([[5, 5]])) == 0


def test_heldout_cross_entropy_is_that_of_smoothed_training_shares():
    """Fifteen ordinary words and three counted tokens: the shares are 3/18, 2/18, and 1/18 for an unseen word."""
    train, heldout = counts_of([[5, 5, 6]]), counts_of([[5, 7, 1]])
    expected = -(math.log(3 / 18) + math.log(1 / 18)) / 2
    assert unigram_cross_entropy(train, heldout, VOCABULARY) == pytest.approx(expected)
