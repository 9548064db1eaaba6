"""From a configuration that names indexed datasets to samples: every kind, blends, divisions and refusals."""

import numpy as np
import pytest

from chimera.data import (
    BlendedSamples,
    DataConfig,
    MicrobatchSource,
    build_data,
    build_dataset,
    train_wordpiece,
    unigram_entropy,
)
from chimera.data.text import TextOptions
from chimera.errors import ConfigError, DataError

WORDS = ["the", "of", "and", "that", "he", "in", "it", "his", "to", "was", "not", "with", "for", "they", "all"]
KINDS = {
    "bert": ("input_ids", "token_type_ids", "attention_mask", "mlm_labels", "nsp_labels"),
    "gpt": ("input_ids", "labels"),
    "t5": ("input_ids", "attention_mask", "decoder_input_ids", "labels"),
    "ict": ("query_ids", "query_attention_mask", "block_ids", "block_attention_mask"),
}


def text(seed, num_documents, num_sentences=8):
    rng = np.random.default_rng(seed)
    return "".join(
        "".join(" ".join(rng.choice(WORDS, 7)) + ".\n" for _ in range(num_sentences)) + "\n"
        for _ in range(num_documents)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two datasets of one tokenizer, a large one and a small one, and the text of the first."""
    folder = tmp_path_factory.mktemp("datasets")
    for name, seed, count in (("large", 1, 60), ("small", 2, 20)):
        (folder / f"{name}.txt").write_text(text(seed, count))
    tokenizer = train_wordpiece(text(1, 60).split("\n"), vocab_size=40)
    for name in ("large", "small"):
        build_dataset([folder / f"{name}.txt"], folder / name, tokenizer=tokenizer, options=TextOptions())
    return folder


def config(folder, *names, **options):
    chosen = {"datasets": tuple(str(folder / name) for name in names), "cache_dir": str(folder / "cache")}
    sizes = {"sequence_length": 32, "heldout_fraction": 0.2, "vocab_size": 40}
    return DataConfig(**chosen | sizes | options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sample_comes_from_a_dataset(folder, kind):
    """Fields and shapes of a micro-batch, the same when asked again from the cache."""
    options = {"query_length": 12} if kind == "ict" else {}
    data = build_data(config(folder, "large", samples=kind, **options))
    batch = MicrobatchSource(data.train, 3, 2).microbatch(1, 1)
    again = MicrobatchSource(build_data(config(folder, "large", samples=kind, **options)).train, 3, 2).microbatch(1, 1)
    assert tuple(batch) == data.train.fields == KINDS[kind]
    assert all(batch[name].tolist() == again[name].tolist() for name in batch)
    assert batch[KINDS[kind][-2]].shape[0] == 3
    assert data.vocab_size == (140 if kind == "t5" else 40)
    assert (data.num_train_documents, data.num_heldout_documents) == (48, 12)


def test_a_dataset_gives_the_samples_of_its_text(folder):
    """With the same division, BERT's samples are those of the text file that the dataset was built from."""
    given = str(folder / "large.tokenizer.json")
    common = {"sequence_length": 32, "heldout_fraction": 0.2, "cache_dir": str(folder / "cache"), "vocabulary": given}
    of_text = build_data(DataConfig(corpus=str(folder / "large.txt"), **common))
    of_dataset = build_data(config(folder, "large"))
    assert len(of_text.train) == len(of_dataset.train)
    for index in range(50):
        ours, theirs = of_dataset.train[index], of_text.train[index]
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert of_dataset.unigram_entropy == of_text.unigram_entropy
    assert of_dataset.heldout_unigram_cross_entropy == of_text.heldout_unigram_cross_entropy


def test_datasets_are_blended_by_weight(folder):
    """Three of ten samples come from the small one; without weights, in proportion to what there is."""
    data = build_data(config(folder, "large", "small", weights=(0.7, 0.3)))
    assert isinstance(data.train, BlendedSamples)
    assert [data.train.source_of(index)[0] for index in range(40)].count(1) == 12
    natural = build_data(config(folder, "large", "small")).train
    assert [natural.source_of(index)[0] for index in range(400)].count(1) == 100
    assert data.num_train_documents == 64


def test_parts_may_be_files(folder):
    """Held-out and test samples of datasets of their own leave the training documents whole."""
    other = (str(folder / "small"),)
    data = build_data(config(folder, "large", heldout_datasets=other, test_datasets=other))
    assert (data.num_train_documents, data.num_heldout_documents) == (60, 20)
    assert data.test is not None
    assert np.array_equal(data.test[3]["input_ids"], data.heldout[3]["input_ids"])
    divided = build_data(config(folder, "large", test_fraction=0.2))
    assert (divided.num_train_documents, divided.num_heldout_documents) == (36, 12)
    assert divided.test is not None


def test_words_and_order_change_samples(folder):
    """The options of masking reach the samples."""
    plain = build_data(config(folder, "large")).train
    for options in ({"whole_words": True}, {"longest_ngram": 3}, {"pairs": "order"}):
        other = build_data(config(folder, "large", **options)).train
        assert any(not np.array_equal(plain[i]["input_ids"], other[i]["input_ids"]) for i in range(20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "x", "datasets": ("a",)}, r"data\.corpus and data\.datasets are both given"),
        ({"datasets": ("a", "b"), "weights": (1.0,)}, r"data\.weights has 1 numbers for 2"),
        ({"heldout_datasets": ("a",)}, r"data\.heldout_datasets is given without data\.datasets"),
        ({"test_fraction": 0.1}, r"data\.test_fraction divides data\.datasets"),
        ({"samples": "gtp"}, r"data\.samples is 'gtp' \(did you mean 'gpt'\?\)"),
        ({"samples": "gpt", "whole_words": True}, r"data\.whole_words is for bert samples; data\.samples is gpt"),
        ({"mean_span_length": 4.0}, r"data\.mean_span_length is for t5 samples"),
        ({"workers": -1}, r"data\.workers is -1"),
        ({"test_fraction": 0.96, "datasets": ("a",)}, r"data\.test_fraction is 0\.96; .*leave something"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    """Named with what to leave out."""
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


def test_a_tokenizer_that_is_not_the_datasets_is_refused(folder):
    """Ids beyond the vocabulary, and a dataset without a tokenizer beside it, are errors that name the option."""
    words = "".join(f"{token}\n" for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"))
    (folder / "vocab.txt").write_text(words)
    with pytest.raises(DataError, match=r"there is a token \d+, and the vocabulary has 6; set data\.vocabulary"):
        build_data(config(folder, "large", vocabulary=str(folder / "vocab.txt"), vocab_size=None))
    path = folder / "small.tokenizer.json"
    content = path.read_text()
    path.unlink()
    try:
        with pytest.raises(DataError, match=r"small\.tokenizer\.json does not exist; set data\.vocabulary"):
            build_data(config(folder, "small"))
    finally:
        path.write_text(content)


def test_the_entropy_counts_training_documents_only():
    """A uniform distribution over four tokens has ln 4, whatever special ones count."""
    assert unigram_entropy(np.array([0, 5, 5, 5, 5])) == pytest.approx(np.log(4))
