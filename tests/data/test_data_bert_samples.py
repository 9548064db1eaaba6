import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.data import IGNORED_LABEL, BertSamples, TokenizedDocuments, Vocabulary
from chimera.data.keyed import NUM_ROUNDS, permuted
from chimera.errors import ConfigError, DataError

PAD, UNK, CLS, SEP, MASK, FIRST_WORD, SIZE = 0, 1, 2, 3, 4, 5, 1005
VOCABULARY = Vocabulary(SIZE, PAD, UNK, CLS, SEP, MASK, (0, 1, 2, 3, 4))
KEYS = ["input_ids", "token_type_ids", "attention_mask", "mlm_labels", "nsp_labels"]

token_ids = st.one_of(st.integers(FIRST_WORD, SIZE - 1), st.just(UNK), st.integers(FIRST_WORD, FIRST_WORD + 2))
id_documents = st.lists(
    st.lists(st.lists(token_ids, min_size=1, max_size=12), min_size=1, max_size=6), min_size=2, max_size=8
).filter(
    lambda documents: (
        any(len(document) > 1 for document in documents)
        and any(token != UNK for document in documents for sentence in document for token in sentence)
    )
)


def samples_of(documents, *, sequence_length=32, seed=0, mlm_probability=0.15):
    return BertSamples(
        TokenizedDocuments.from_ids(documents, vocab_size=SIZE),
        sequence_length=sequence_length,
        seed=seed,
        vocabulary=VOCABULARY,
        mlm_probability=mlm_probability,
    )


def book(num_documents, num_sentences, length, seed=0):
    """Documents of random words."""
    words = np.random.default_rng(seed).integers(FIRST_WORD, SIZE, (num_documents, num_sentences, length))
    return words.tolist()


def restored_segments(sample):
    """A and B as they were before masking."""
    labels = sample["mlm_labels"]
    ids = np.where(labels == IGNORED_LABEL, sample["input_ids"], labels).tolist()
    middle = int(
        (sample["token_type_ids"] == 0).nonzero()[0][sample["attention_mask"][sample["token_type_ids"] == 0] == 1][-1]
    )
    end = int(sample["attention_mask"].sum()) - 1
    assert ids[0] == CLS
    assert ids[middle] == ids[end] == SEP
    return ids[1:middle], ids[middle + 1 : end]


def occurrences(part, whole):
    """Where a list occurs in another."""
    return [at for at in range(len(whole) - len(part) + 1) if whole[at : at + len(part)] == part]


@settings(deadline=None)
@given(id_documents, st.integers(5, 40), st.integers(0, 2**63 - 1), st.integers(0, 10**12))
def test_every_sample_is_well_formed(documents, sequence_length, seed, index):
    """Shapes, types, frame, padding, labels and special tokens, for any corpus, length, seed and index."""
    sample = samples_of(documents, sequence_length=sequence_length, seed=seed)[index]
    assert list(sample) == KEYS
    assert {array.dtype for array in sample.values()} == {np.dtype(np.int64)}
    assert [array.shape for array in sample.values()] == [(sequence_length,)] * 4 + [()]
    ids, types, attention, labels, label = sample.values()
    end = int(attention.sum())
    assert attention.tolist() == [1] * end + [0] * (sequence_length - end)
    assert not ids[end:].any()
    assert ids[0] == CLS
    separators = (ids == SEP).nonzero()[0].tolist()
    assert len(separators) == 2
    middle, last = separators
    assert last == end - 1
    assert 1 < middle < last - 1
    assert types.tolist() == [0] * (middle + 1) + [1] * (last - middle) + [0] * (sequence_length - end)
    chosen = labels != IGNORED_LABEL
    assert not chosen[[0, middle, last]].any()
    assert not chosen[end:].any()
    assert not np.isin(labels[chosen], VOCABULARY.special).any()
    assert not np.isin(ids[chosen & (ids != MASK)], VOCABULARY.special).any()
    assert (ids[~chosen] != MASK).all()
    maskable = end - 3 - int((ids[:end] == UNK).sum())
    assert chosen.sum() == (max(1, round(0.15 * maskable)) if maskable else 0)
    assert label in (0, 1)


@settings(deadline=None)
@given(id_documents, st.integers(5, 40), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_the_next_sentence_label_is_true(documents, sequence_length, seed, index):
    """A true pair lies in one document, in order; a random B is nowhere what follows A in a document of A's."""
    sample = samples_of(documents, sequence_length=sequence_length, seed=seed)[index]
    first, second = restored_segments(sample)
    texts = [list(itertools.chain(*document)) for document in documents]
    uncut = len(first) + len(second) < sequence_length - 3
    if sample["nsp_labels"] == 0:
        assert any(
            after >= before + len(first)
            for text in texts
            for before in occurrences(first, text)
            for after in occurrences(second, text)
        )
        if uncut:
            assert any(occurrences(first + second, text) for text in texts)
        return
    assert any(occurrences(second, text) for text in texts)


def test_no_random_segment_is_the_true_continuation():
    """Even in a corpus of repetitions, a random B never begins as what follows A in the document A was taken from."""
    rng = np.random.default_rng(1)
    # Every document opens with words of its own, which make A's place known; the rest is three words over and over.
    documents = [
        [[FIRST_WORD + 100 + 20 * number + at] for at in range(8)]
        + rng.integers(FIRST_WORD, FIRST_WORD + 2, (12, 2)).tolist()
        for number in range(12)
    ]
    samples = samples_of(documents, sequence_length=64)
    texts = [list(itertools.chain(*document)) for document in documents]
    num_random = 0
    for index in range(6000):
        sample = samples[index]
        first, second = restored_segments(sample)
        places = [(text, at) for text in texts for at in occurrences(first, text)]
        if sample["nsp_labels"] == 0 or len(places) != 1:
            continue
        ((text, at),) = places
        following = text[at + len(first) :]
        common = min(len(second), len(following))
        assert following[:common] != second[:common]
        num_random += 1
    assert num_random > 1000


def test_a_random_segment_comes_from_another_document():
    """With words of its own in each document, A and B show where they come from."""
    documents = [[[FIRST_WORD + 10 * number + at] * 4 for at in range(6)] for number in range(20)]
    samples = samples_of(documents)
    pairs = [(restored_segments(sample), int(sample["nsp_labels"])) for sample in map(samples.__getitem__, range(2000))]
    for (first, second), label in pairs:
        sources = [{(token - FIRST_WORD) // 10 for token in segment} for segment in (first, second)]
        assert [len(source) for source in sources] == [1, 1]
        assert (sources[0] != sources[1]) == bool(label)
    assert {(second[0] - FIRST_WORD) // 10 for (_, second), label in pairs if label} == set(range(20))


def test_documents_of_one_sentence_are_second_segments_only():
    """They are met as random B and never as A."""
    documents = [*book(3, 5, 4), [[900] * 3], [[901] * 3]]
    segments = [restored_segments(samples_of(documents)[index]) for index in range(400)]
    assert not [first for first, _ in segments if first[0] in (900, 901)]
    assert {second[0] for _, second in segments} >= {900, 901}


def test_copies_of_one_document_give_true_pairs_only():
    """Where every other document continues A as its own does, no random pair can be made and none is claimed."""
    documents = [[[7, 8], [9, 10]]] * 3
    # B may be drawn as the whole copy, whose first sentence is A's and not the continuation.
    for index in range(200):
        sample = samples_of(documents, sequence_length=16)[index]
        if sample["nsp_labels"]:
            assert restored_segments(sample)[1][:2] == [7, 8]
    identical = [[[7], [7]]] * 3
    assert not any(samples_of(identical, sequence_length=16)[index]["nsp_labels"] for index in range(200))


def test_shares_are_those_of_bert():
    """15 % chosen; of those 80 % masked, 10 % random, 10 % kept; half of the pairs random."""
    documents = book(40, 20, 12)
    samples = samples_of(documents, sequence_length=128, seed=3)
    rows = [samples[index] for index in range(4000)]
    ids, labels, attention = (
        np.stack([row[key] for row in rows]) for key in ("input_ids", "mlm_labels", "attention_mask")
    )
    chosen = labels != IGNORED_LABEL
    num_chosen, num_maskable = int(chosen.sum()), int(attention.sum()) - 3 * len(rows)
    assert num_chosen / num_maskable == pytest.approx(0.15, abs=0.003)
    masked = (ids == MASK)[chosen].sum() / num_chosen
    kept = (ids == labels)[chosen].sum() / num_chosen
    tolerance = 5 * np.sqrt(0.25 / num_chosen)
    assert masked == pytest.approx(0.8, abs=tolerance)
    assert kept == pytest.approx(0.1 + 0.1 / 1000, abs=tolerance)  # a random word is the same one in a thousand
    drawn = ids[chosen & (ids != MASK) & (ids != labels)]
    assert drawn.min() < FIRST_WORD + 10
    assert drawn.max() > SIZE - 10
    assert np.mean([row["nsp_labels"] for row in rows]) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(len(rows)))


def test_random_words_are_any_but_special_ones():
    """In a vocabulary of three words, each of them is drawn and no special token ever is."""
    vocabulary = Vocabulary(8, PAD, UNK, CLS, SEP, MASK, (0, 1, 2, 3, 4))
    documents = TokenizedDocuments.from_ids([[[5] * 20, [5] * 20], [[5] * 7 + [6]]], vocab_size=8)
    samples = BertSamples(documents, sequence_length=64, seed=0, vocabulary=vocabulary, mlm_probability=0.5)
    drawn = [
        token
        for index in range(300)
        for token in samples[index]["input_ids"][samples[index]["mlm_labels"] == 5].tolist()
    ]
    assert set(drawn) == {MASK, 5, 6, 7}
    # 10 % over three words, and the 10 % that stay.
    assert [drawn.count(token) / len(drawn) for token in (5, 6, 7)] == pytest.approx([4 / 30, 1 / 30, 1 / 30], abs=0.02)


def test_each_place_is_chosen_equally_often():
    """The choice of tokens has no favourite position."""
    samples = samples_of(book(10, 10, 16), sequence_length=35)
    counts = sum((samples[index]["mlm_labels"] != IGNORED_LABEL).astype(int) for index in range(6000))
    inner = counts[(counts > 0)]
    assert len(inner) == 32  # two sentences of 16 at most; [CLS] and the last [SEP] never, the middle one moves
    assert counts[1:17].std() / counts[1:17].mean() < 0.1


def test_an_epoch_starts_at_every_sentence_once():
    """Each sentence with a next one opens exactly one sample of each epoch, in another order each time."""
    documents = [[[FIRST_WORD + 10 * number + at] * 2 for at in range(5)] for number in range(6)]
    samples = samples_of(documents, sequence_length=100)
    assert len(samples) == 24
    epochs = [[restored_segments(samples[24 * epoch + index])[0][0] for index in range(24)] for epoch in range(3)]
    openings = sorted(FIRST_WORD + 10 * number + at for number in range(6) for at in range(4))
    assert [sorted(epoch) for epoch in epochs] == [openings] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(list(samples)) == 24


@given(st.integers(1, 5000), st.lists(st.integers(0, 2**64 - 1), min_size=NUM_ROUNDS, max_size=NUM_ROUNDS))
@settings(deadline=None, max_examples=30)
def test_the_permutation_is_one(size, keys):
    """Every element comes out once, for any size."""
    assert sorted(permuted(position, size, keys) for position in range(size)) == list(range(size))


def test_samples_do_not_depend_on_what_was_asked_before():
    """Backwards, twice, and from another object: equal arrays; another seed or index: others."""
    documents = book(10, 10, 6)
    forward = [samples_of(documents)[index] for index in range(50)]
    one = samples_of(documents)
    backward = [one[index] for index in reversed(range(50))][::-1]
    for left, right in zip(forward, backward, strict=True):
        assert all(np.array_equal(left[key], right[key]) for key in KEYS)
    assert not np.array_equal(forward[0]["input_ids"], samples_of(documents, seed=1)[0]["input_ids"])
    with pytest.raises(IndexError, match="counted from 0"):
        one[-1]


def test_the_values_of_a_sample_are_fixed():
    """A frozen sample: a change of the numbers behind it would silently change every resumed run."""
    documents = [[[10, 11, 12], [13, 14], [15, 16, 17, 18]], [[20, 21, 22], [23, 24, 25]], [[30, 31]]]
    sample = samples_of(documents, sequence_length=12, seed=7, mlm_probability=0.4)[5]
    assert {key: value.tolist() for key, value in sample.items()} == {
        "input_ids": [2, 10, 11, 12, 3, 4, 4, 15, 18, 4, 18, 3],
        "token_type_ids": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
        "attention_mask": [1] * 12,
        "mlm_labels": [-100, -100, -100, -100, -100, 13, 14, -100, 16, 17, -100, -100],
        "nsp_labels": 0,
    }


def test_long_pairs_lose_tokens_of_the_longer_segment():
    """Both segments end up as long as BERT's one-by-one removal leaves them."""
    for a, b, room in itertools.product(range(1, 24, 3), range(1, 24, 4), (2, 7, 12, 13)):
        left, right = a, b
        while left + right > room:
            if left > right:
                left -= 1
            else:
                right -= 1
        sample = samples_of([[[8] * a, [9] * b], [[7] * b]], sequence_length=room + 3)[0]
        assert tuple(map(len, restored_segments(sample))) == (left, right)


def test_an_excess_is_taken_from_both_ends():
    """Tokens go at either end, so first and last tokens of a long segment survive equally often."""
    documents = [[list(range(10, 50)), list(range(60, 100))], [list(range(110, 150))]]
    firsts = np.array([restored_segments(samples_of(documents, sequence_length=43)[index])[0] for index in range(400)])
    assert firsts.shape == (400, 20)
    dropped_in_front = firsts[:, 0] - 10
    assert dropped_in_front.mean() == pytest.approx(10, abs=1)
    assert 1 < dropped_in_front.std() < 4  # a sum of twenty coins: 2.24


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[[7], [8]]], r"1 document\(s\) with text: .*at least two are needed"),
        ([[[7]], [[8]]], "none of 2 documents has two sentences"),
        ([[[7], []], [[8]]], "none of 2 documents has two sentences"),
        ([[[UNK], [UNK]], [[UNK]]], "all are unknown"),
    ],
)
def test_a_corpus_without_pairs_is_refused(documents, message):
    """No other document, no next sentence, or no known word."""
    with pytest.raises(DataError, match=message):
        samples_of(documents)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 4}, r"data.sequence_length is 4; .* at least 5"),
        ({"seed": -1}, "data.seed is -1"),
        ({"mlm_probability": 0.0}, "data.mlm_probability is 0.0"),
        ({"mlm_probability": 1.5}, "data.mlm_probability is 1.5"),
        ({"mlm_probability": float("nan")}, "data.mlm_probability is nan"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    """The message names option and value."""
    with pytest.raises(ConfigError, match=message):
        samples_of(book(2, 2, 2), **options)


def test_flat_tokens_are_small():
    """Ids that fit into 16 bits take 16 bits."""
    assert TokenizedDocuments.from_ids([[[65535]]], vocab_size=1 << 16).tokens.dtype == np.uint16
    assert TokenizedDocuments.from_ids([[[65536]]], vocab_size=(1 << 16) + 1).tokens.dtype == np.int32


@given(id_documents, st.data())
def test_selected_documents_are_those_documents(documents, data):
    """Selecting keeps order and content, empty documents included."""
    documents = [*documents, []]
    chosen = data.draw(st.lists(st.integers(0, len(documents) - 1), unique=True))
    flat = TokenizedDocuments.from_ids(documents, vocab_size=SIZE).select(np.array(chosen, dtype=np.int64))
    expected = [documents[index] for index in chosen]
    assert flat.num_documents == len(expected)
    assert [flat.sentence(index).tolist() for index in range(flat.num_sentences)] == list(itertools.chain(*expected))
    assert np.diff(flat.document_starts).tolist() == [len(document) for document in expected]
