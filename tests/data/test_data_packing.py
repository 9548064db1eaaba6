"""GPT's, T5's and ICT's samples, and what they stand on: packing, blocks and the division of an indexed dataset."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.data import (
    GptSamples,
    IctSamples,
    IndexedDataset,
    IndexedWriter,
    SpanVocabulary,
    T5Samples,
    TokenizedDocuments,
    Vocabulary,
)
from chimera.data.indexed_documents import open_parts
from chimera.data.packing import PackedPieces, pack, shuffled
from chimera.data.t5_samples import span_lengths
from chimera.errors import ConfigError, DataError

SIZE = 5000
VOCABULARY = Vocabulary(SIZE, 0, 1, 2, 3, 4, (0, 1, 2, 3, 4))
SPANS = SpanVocabulary(SIZE + 100, 0, 3, tuple(range(SIZE + 99, SIZE - 1, -1)))


def numbered(lengths):
    """Documents of one sentence of each length; every token of the corpus is another number."""
    ids = itertools.count(5)
    return TokenizedDocuments.from_ids([[[next(ids) for _ in range(n)]] for n in lengths], vocab_size=SIZE)


def epoch_of(samples, number=0):
    return [samples[number * len(samples) + index] for index in range(len(samples))]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 1), st.integers(0, 99))
def test_pieces_are_the_joined_documents_cut(lengths, step, overlap, seed):
    """In the order of their places, the pieces are the shuffled documents end to end: every token once but the tail."""
    documents = numbered(lengths)
    total = sum(lengths)
    if (total - overlap) // step < 1:
        return
    pieces = PackedPieces(documents, length=step + overlap, overlap=overlap, seed=seed)
    order = shuffled(len([n for n in lengths if n]), int(np.random.Philox(key=seed, counter=3 << 192).random_raw()))
    filled = [documents.sentence(index).tolist() for index in range(documents.num_sentences)]
    joined = list(itertools.chain.from_iterable(filled[index] for index in order))
    expected = [joined[at * step : at * step + step + overlap] for at in range((total - overlap) // step)]
    assert sorted(pieces[index].tolist() for index in range(len(pieces))) == sorted(expected)


def test_every_epoch_has_another_order():
    """Documents and pieces are shuffled anew, and asking backwards or twice changes nothing."""
    samples = GptSamples(numbered([7] * 30), sequence_length=8, seed=1)
    epochs = [[tuple(sample["input_ids"]) for sample in epoch_of(samples, number)] for number in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({frozenset(epoch) for epoch in epochs}) == 3
    again = GptSamples(numbered([7] * 30), sequence_length=8, seed=1)
    backward = [tuple(again[index]["input_ids"]) for index in reversed(range(3 * len(again)))]
    assert backward[::-1] == list(itertools.chain.from_iterable(epochs))


def test_a_label_is_the_next_token():
    """Labels are the ids one position on, into the next document where one ends."""
    samples = GptSamples(numbered([5, 6, 7]), sequence_length=4, seed=0)
    for sample in epoch_of(samples):
        assert sample["input_ids"][1:].tolist() == sample["labels"][:-1].tolist()
    seen = Counter(itertools.chain.from_iterable(sample["labels"].tolist() for sample in epoch_of(samples)))
    assert set(seen.values()) == {1}
    assert len(seen) == 16


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_the_shuffle_is_a_permutation(size, key):
    """Every number comes out once; another key gives another order."""
    assert sorted(shuffled(size, key).tolist()) == list(range(size))


def test_wide_numbers_are_used_where_narrow_ones_do_not_do():
    """A document of more than 2**31 tokens makes offsets of 64 bits."""
    lengths = np.array([10, (1 << 31) + 10], np.int64)
    places = pack(lengths, np.array([1, 0], np.int32), 4, 1 << 29)
    assert places.dtype == np.int64
    assert places.tolist() == [[0, n << 29] for n in range(4)]
    assert pack(np.array([4, 4]), np.array([0, 1], np.int32), 2, 3).dtype == np.int32


def test_a_corpus_shorter_than_a_sample_is_refused():
    """The message has both lengths and the option."""
    with pytest.raises(DataError, match=r"have 3 tokens in all, a sample takes 9; set a shorter data\.sequence_length"):
        GptSamples(numbered([3]), sequence_length=8, seed=0)


def restored(sample):
    """The text of a T5 sample: each sentinel of the input replaced by what the labels say of it."""
    labels = [token for token in sample["labels"].tolist() if token != -100]
    assert labels[-1] == SPANS.end
    cut, current = {}, None
    for token in labels[:-1]:
        if token in SPANS.sentinels:
            current = cut.setdefault(token, [])
        else:
            current.append(token)
    inputs = sample["input_ids"][sample["attention_mask"] == 1].tolist()
    assert inputs[-1] == SPANS.end
    return list(itertools.chain.from_iterable(cut.get(token, [token]) for token in inputs[:-1])), cut


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 80), st.integers(0, 1000), st.floats(0.05, 0.9), st.floats(1, 8))
def test_t5_samples_put_together_are_the_text(length, index, density, mean):
    """Spans are never empty, sentinels go downward from the highest, and nothing of the text is lost."""
    samples = T5Samples(
        numbered([4000]), sequence_length=length, seed=3, vocabulary=SPANS, noise_density=density, mean_span_length=mean
    )
    sample = samples[index]
    text, cut = restored(sample)
    assert text == list(range(text[0], text[0] + len(text)))
    assert list(cut) == list(SPANS.sentinels[: len(cut)])
    assert all(cut.values())
    assert sample["attention_mask"].sum() in {length, length - 1}
    assert sample["decoder_input_ids"].tolist()[1:] == [max(token, 0) for token in sample["labels"].tolist()[:-1]]
    assert sample["decoder_input_ids"][0] == SPANS.pad


def test_t5_lengths_are_those_of_the_original():
    """Raffel et al.: 512 tokens of input, 15 % noise and spans of 3 make 568 tokens of text and 114 of target."""
    text, noise, spans = span_lengths(512, 0.15, 3.0)
    assert (text, noise + spans + 1) == (568, 114)


def test_t5_options_are_checked():
    """More spans than sentinels, and values outside their range, are named."""
    few = SpanVocabulary(SIZE + 1, 0, 3, (SIZE,))
    with pytest.raises(ConfigError, match="gives 28 spans, the vocabulary has 1 sentinels"):
        T5Samples(numbered([900]), sequence_length=512, seed=0, vocabulary=few)
    with pytest.raises(ConfigError, match=r"data\.mean_span_length is 0\.5"):
        T5Samples(numbered([900]), sequence_length=64, seed=0, vocabulary=SPANS, mean_span_length=0.5)


def sentences(num_documents, num_sentences, length):
    ids = itertools.count(5)
    return TokenizedDocuments.from_ids(
        [[[next(ids) for _ in range(length)] for _ in range(num_sentences)] for _ in range(num_documents)],
        vocab_size=SIZE,
    )


def body(ids, mask):
    tokens = ids[mask == 1].tolist()
    assert (tokens[0], tokens[-1]) == (2, 3)
    assert not ids[mask == 0].any()
    return tokens[1:-1]


def test_a_query_comes_from_its_block():
    """Blocks fill the sequence inside a document; the query is one of the sentences, mostly removed from it."""
    samples = IctSamples(sentences(20, 7, 5), sequence_length=22, query_length=10, seed=0, vocabulary=VOCABULARY)
    assert len(samples) == 40  # of each document a block of four sentences, 4 · 5 + 2 tokens, and one of three
    kept = 0
    for index in range(2000):
        sample = samples[index]
        query = body(sample["query_ids"], sample["query_attention_mask"])
        block = body(sample["block_ids"], sample["block_attention_mask"])
        assert len(query) == 5
        whole = sorted(set(query) | set(block))
        assert whole == list(range(whole[0], whole[0] + len(whole)))
        kept += query[0] in block
    assert kept / 2000 == pytest.approx(0.1, abs=0.03)


def test_every_block_comes_once_in_an_epoch():
    """Whatever sentence is drawn, each block is met."""
    samples = IctSamples(sentences(10, 6, 4), sequence_length=14, query_length=6, seed=2, vocabulary=VOCABULARY)
    for number in range(2):
        blocks = [
            min(body(s["query_ids"], s["query_attention_mask"]) + body(s["block_ids"], s["block_attention_mask"]))
            for s in epoch_of(samples, number)
        ]
        assert len(set(blocks)) == len(samples) == 20


def test_documents_without_a_block_are_refused():
    """Single sentences, or none that fit beside another, make no block."""
    with pytest.raises(DataError, match="none of 3 documents has two sentences that fit into 10 tokens"):
        IctSamples(sentences(3, 4, 8), sequence_length=12, query_length=6, seed=0, vocabulary=VOCABULARY)
    with pytest.raises(ConfigError, match=r"data\.query_length is 13; .* at most data\.sequence_length, 12"):
        IctSamples(sentences(3, 4, 2), sequence_length=12, query_length=13, seed=0, vocabulary=VOCABULARY)


@pytest.fixture
def dataset(tmp_path):
    """Two hundred documents of three sequences, one of them empty, and some empty documents."""
    with IndexedWriter(tmp_path / "set", np.dtype("<u2")) as writer:
        for number in range(200):
            writer.add_document([] if number % 50 == 7 else [[number + 5] * 3, [], [number + 5] * 2])
    return IndexedDataset(tmp_path / "set")


def test_a_dataset_is_divided_by_ratio(dataset, tmp_path):
    """No document is in two parts, none is lost, each part has its share, and tokens are not copied."""
    parts = open_parts(dataset, (0.8, 0.15, 0.05), seed=4, cache_dir=tmp_path / "cache")
    assert [part.documents.num_documents for part in parts] == [160, 30, 10]
    found = [{int(token) for block in part.documents.token_blocks() for token in block} for part in parts]
    assert sorted(itertools.chain.from_iterable(found)) == [n + 5 for n in range(200) if n % 50 != 7]
    assert sum(part.documents.num_tokens for part in parts) == len(dataset.tokens)
    assert all(np.shares_memory(part.documents.tokens, dataset.tokens) for part in parts)
    assert all(part.documents.num_sentences == 2 * len(ids) for part, ids in zip(parts, found, strict=True))


def test_a_changed_dataset_is_not_taken_from_the_cache(dataset, tmp_path):
    """The cache knows a dataset by its files, not by its name."""
    (before,) = open_parts(dataset, (1.0,), seed=0, cache_dir=tmp_path / "cache")
    with IndexedWriter(dataset.prefix, np.dtype("<u2"), overwrite=True) as writer:
        writer.add_document([[9, 9], [9]])
    (after,) = open_parts(IndexedDataset(dataset.prefix), (1.0,), seed=0, cache_dir=tmp_path / "cache")
    assert (before.documents.num_documents, after.documents.num_documents) == (200, 1)


def test_too_small_a_part_is_refused(dataset, tmp_path):
    """A share that gives no document is an error that names the dataset."""
    with pytest.raises(DataError, match=r"set\.idx: 200 document\(s\) cannot be divided by .*part 2 would have 0"):
        open_parts(dataset, (0.999, 0.001), seed=0, cache_dir=tmp_path)
