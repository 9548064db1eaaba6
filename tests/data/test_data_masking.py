"""Whole words, stretches of words, and the order of two segments."""

import itertools

import numpy as np
import pytest

from chimera.data import IGNORED_LABEL, BertSamples, TokenizedDocuments, Vocabulary, Words
from chimera.data.keyed import Purpose, keyed_stream
from chimera.data.masking import Masking
from chimera.errors import ConfigError

SIZE, MASK = 400, 4
VOCABULARY = Vocabulary(SIZE, 0, 1, 2, 3, MASK, (0, 1, 2, 3, 4))
CONTINUATIONS = np.arange(SIZE) >= 200


def stretches(ids, index, *, share=0.15, words=None):
    """The chosen positions of a sequence, and its ids after masking."""
    ids = np.array(ids, np.int64)
    labels = Masking(VOCABULARY, share=share, words=words).apply(ids, keyed_stream(1, index, Purpose.SAMPLE))
    return np.flatnonzero(labels != IGNORED_LABEL).tolist(), ids


def sequence(rng, num_words):
    """[CLS] words of one to four pieces [SEP] words [SEP], and where each word begins."""
    ids, words = [2], []
    for number in range(num_words):
        if number == num_words // 2:
            ids.append(3)
        words.append(range(len(ids), len(ids) + 1 + rng.integers(4)))
        ids += [int(rng.integers(10, 200)), *rng.integers(200, SIZE, len(words[-1]) - 1).tolist()]
    return [*ids, 3], words


def test_whole_words_are_chosen_whole():
    """No word is chosen in part, the budget is never exceeded, and it is nearly filled."""
    rng = np.random.default_rng(0)
    filled = 0.0
    for index in range(300):
        ids, words = sequence(rng, 40)
        chosen, _ = stretches(ids, index, words=Words(CONTINUATIONS))
        budget = round(0.15 * (len(ids) - 3))
        assert len(chosen) <= budget
        parts = [sum(position in chosen for position in word) for word in words]
        assert all(part in {0, len(word)} for part, word in zip(parts, words, strict=True))
        filled += len(chosen) / budget / 300
    assert filled > 0.95


def test_a_word_longer_than_the_budget_is_chosen_where_nothing_else_is():
    """A sample always has something to predict: the shortest word."""
    chosen, _ = stretches([2, 10, 200, 201, 3, 11, 202, 3], 0, words=Words(CONTINUATIONS))
    assert chosen == [5, 6]


def test_stretches_are_mostly_short_and_never_cross_a_special_token():
    """P(n) is in proportion to 1/n for n up to 3; a run of chosen words ends at [SEP]."""
    words = Words(None, 3)
    ids = [2, *range(10, 130), 3, *range(130, 199), 3]
    lengths = []
    for index in range(2000):
        chosen, _ = stretches(ids, index, share=0.02, words=words)
        runs = np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
        assert not any(run[0] < 121 < run[-1] for run in runs)
        lengths += [len(run) for run in runs[:1]]
    shares = [lengths.count(n) / len(lengths) for n in (1, 2, 3)]
    assert shares[0] > shares[1] > shares[2] > 0.1
    assert shares[0] == pytest.approx(6 / 11, abs=0.08)


def test_shares_of_what_replaces_a_chosen_token_stay():
    """80 % [MASK], 10 % random, 10 % kept, by token also where words are chosen."""
    rng = np.random.default_rng(1)
    masked = kept = total = 0
    for index in range(1500):
        ids, _ = sequence(rng, 30)
        chosen, after = stretches(ids, index, words=Words(CONTINUATIONS, 2))
        masked += int((after[chosen] == MASK).sum())
        kept += int((after[chosen] == np.array(ids)[chosen]).sum())
        total += len(chosen)
    assert masked / total == pytest.approx(0.8, abs=0.02)
    assert kept / total == pytest.approx(0.1, abs=0.015)


def test_words_of_no_length_are_refused():
    """The option is named."""
    with pytest.raises(ConfigError, match=r"data\.longest_ngram is 0"):
        Words(None, 0)


def test_sentence_order_swaps_segments_of_one_document():
    """Half of the pairs are swapped; label 0 reads on, label 1 reads on from B to A, in one document either way."""
    ids = itertools.count(5)
    documents = TokenizedDocuments.from_ids(
        [[[next(ids) for _ in range(4)] for _ in range(6)] for _ in range(16)], vocab_size=SIZE
    )
    samples = BertSamples(
        documents, sequence_length=32, seed=0, vocabulary=VOCABULARY, pairs="order", mlm_probability=0.01
    )
    swapped = 0
    for index in range(600):
        sample = samples[index]
        labels = sample["mlm_labels"]
        tokens = np.where(labels == IGNORED_LABEL, sample["input_ids"], labels)
        used = sample["attention_mask"] == 1
        a = tokens[used & (sample["token_type_ids"] == 0)][1:-1]
        b = tokens[used & (sample["token_type_ids"] == 1)][:-1]
        label = int(sample["nsp_labels"])
        first, second = (b, a) if label else (a, b)
        assert second[0] == first[-1] + 1
        swapped += label
    assert swapped / 600 == pytest.approx(0.5, abs=0.06)
    one = TokenizedDocuments.from_ids([[[5, 6], [7, 8]]], vocab_size=SIZE)
    assert len(BertSamples(one, sequence_length=16, seed=0, vocabulary=VOCABULARY, pairs="order")) == 1
