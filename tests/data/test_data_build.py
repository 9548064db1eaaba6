import json
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera.data import DataConfig, build_data, bundled_corpus_path
from chimera.errors import ConfigError, DataError

WORDS = ["the", "of", "and", "that", "he", "in", "it", "his", "to", "was", "not", "with", "for", "they", "all"]


def corpus_text(num_documents=30, num_sentences=8):
    rng = np.random.default_rng(5)
    return "".join(
        "".join(" ".join(rng.choice(WORDS, 7)) + ".\n" for _ in range(num_sentences)) + "\n"
        for _ in range(num_documents)
    )


@pytest.fixture
def config(tmp_path):
    (tmp_path / "corpus.txt").write_text(corpus_text())
    return lambda **options: DataConfig(
        **{"corpus": str(tmp_path / "corpus.txt"), "cache_dir": str(tmp_path / "cache"), "vocab_size": 50}
        | {"sequence_length": 24, "heldout_fraction": 0.2}
        | options
    )


def cached_files(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").glob("*.npz"))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The bundled corpus with an empty cache, then with a full one."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return [build_data(DataConfig(cache_dir=cache, sequence_length=64)) for _ in range(2)]


def test_the_bundled_corpus_has_the_promised_shape(bundled):
    """Documents, vocabulary, entropy and next-sentence starts of the default configuration."""
    data, again = bundled
    assert (data.num_documents, data.num_train_documents, data.num_heldout_documents) == (1453, 1380, 73)
    assert data.vocab_size == data.tokenizer.vocabulary.size == 4096
    assert data.num_train_tokens > 1_400_000
    assert data.num_empty_sentences == 0
    assert data.unigram_entropy == pytest.approx(6.15, abs=0.02)
    assert data.heldout_unigram_cross_entropy == pytest.approx(6.15, abs=0.1)
    assert data.num_heldout_tokens / data.num_train_tokens == pytest.approx(0.05, abs=0.02)
    for side, other in ((data.train, again.train), (data.heldout, again.heldout)):
        assert len(side) == len(other)
        assert all(np.array_equal(side[len(side) + 3][key], other[len(side) + 3][key]) for key in side[0])


def test_another_process_makes_the_same_samples(config, tmp_path):
    """A process with a cache of its own trains the same vocabulary and makes the same samples."""
    here = build_data(config())
    program = (
        "import json, sys; from chimera.data import DataConfig, build_data;"
        "data = build_data(DataConfig(**json.loads(sys.argv[1])));"
        "print(json.dumps([{k: v.tolist() for k, v in data.train[i].items()} for i in (0, 7, 10**9)]))"
    )
    options = {name: getattr(config(cache_dir=str(tmp_path / "other")), name) for name in DataConfig.__slots__}
    there = subprocess.run(
        [sys.executable, "-c", program, json.dumps(options)], capture_output=True, text=True, check=True
    )
    expected = [{key: value.tolist() for key, value in here.train[index].items()} for index in (0, 7, 10**9)]
    assert json.loads(there.stdout) == expected


def build_and_report(config, queue):
    data = build_data(config)
    queue.put((len(data.train), data.train[3]["input_ids"].tolist()))


def test_processes_may_race_for_the_cache(config, tmp_path):
    """Four ranks that ask at once get the same, and leave one file and nothing half-written."""
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    ranks = [context.Process(target=build_and_report, args=(config(), queue)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    reports = [queue.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(timeout=60)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert all(report == reports[0] for report in reports)
    assert len(cached_files(tmp_path)) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_only_what_changes_the_tokens_makes_a_new_file(config, tmp_path):
    """Sample options share a file; training options and the corpus's content do not."""
    build_data(config())
    build_data(config(sequence_length=40, mlm_probability=0.3))
    assert len(cached_files(tmp_path)) == 1
    for number, options in enumerate(
        ({"vocab_size": 45}, {"lowercase": False}, {"seed": 1}, {"heldout_fraction": 0.3})
    ):
        build_data(config(**options))
        assert len(cached_files(tmp_path)) == 2 + number
    (tmp_path / "corpus.txt").write_text(corpus_text(num_documents=31))
    assert build_data(config()).num_documents == 31
    assert len(cached_files(tmp_path)) == 6


def test_a_damaged_cache_file_is_named(config, tmp_path):
    """A cut file is an error that says to delete it; afterwards all is well."""
    build_data(config())
    (path,) = (tmp_path / "cache").glob("*.npz")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{path.name} is damaged .* delete the file, it will be made again"):
        build_data(config())
    path.unlink()
    assert build_data(config()).num_documents == 30


def test_a_cache_that_cannot_be_written_is_named(config, tmp_path):
    """A file where the folder should be: the option is in the message."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be kept in .*file: .*set data\.cache_dir"):
        build_data(config(cache_dir=str(tmp_path / "file")))


def test_a_failed_build_leaves_nothing_behind(config, tmp_path):
    """No cache file for a vocabulary that could not be trained."""
    with pytest.raises(DataError, match=r"data\.vocab_size asks for 4096"):
        build_data(config(vocab_size=None))
    assert cached_files(tmp_path) == []


def test_a_given_vocabulary_is_used(config, tmp_path):
    """The file's ids are the samples' ids, and a size beside it has to agree."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]) + "\n")
    data = build_data(config(vocabulary=str(path), vocab_size=None))
    assert data.vocab_size == 6 + len(WORDS)
    assert data.tokenizer.tokens()["."] == 5
    assert not (data.train[0]["input_ids"] == 1).any()
    with pytest.raises(DataError, match=r"has 21 tokens, data\.vocab_size is 50; set data\.vocab_size to 21"):
        build_data(config(vocabulary=str(path)))


def test_training_and_heldout_documents_are_apart(config, tmp_path):
    """A word that stands in one document only is met on one side only."""
    (tmp_path / "corpus.txt").write_text("".join(f"x{n} the.\nx{n} of.\n\n" for n in range(100, 140)))
    names = [f"x{n}" for n in range(100, 140)]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *names]) + "\n")
    data = build_data(config(vocabulary=str(tmp_path / "vocab.txt"), vocab_size=None, mlm_probability=0.01))
    sides = [
        {int(token) for index in range(300) for token in side[index]["mlm_labels"]}
        for side in (data.train, data.heldout)
    ]
    assert sides[0] & sides[1] == {-100}
    assert [len(side) - 1 for side in sides] == [32, 8]


def test_sentences_without_tokens_are_counted(config, tmp_path):
    """A line of control characters is no sentence, and is not left out silently."""
    (tmp_path / "corpus.txt").write_text("\u200b\u200b\n" + corpus_text())
    assert build_data(config()).num_empty_sentences == 1


def test_a_side_without_pairs_is_named(config, tmp_path):
    """One held-out document has no other to take a random sentence from."""
    (tmp_path / "corpus.txt").write_text(corpus_text(num_documents=5))
    with pytest.raises(DataError, match=r"held-out documents of .*: 1 document\(s\) with text: .*heldout_fraction 0.2"):
        build_data(config())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": ""}, "data.corpus is empty"),
        ({"vocab_size": 0}, "data.vocab_size is 0"),
        ({"heldout_fraction": 0.0}, "data.heldout_fraction is 0.0"),
        ({"heldout_fraction": 1.0}, "data.heldout_fraction is 1.0"),
        ({"sequence_length": 3}, "data.sequence_length is 3"),
        ({"seed": -3}, "data.seed is -3"),
        ({"mlm_probability": 1.0}, "data.mlm_probability is 1.0"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    """The configuration cannot be made with them."""
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


@given(st.integers(5, 512), st.floats(0.01, 0.99), st.integers(0, 2**63 - 1))
def test_configurations_are_values(sequence_length, fraction, seed):
    """Equal options make equal, hashable configurations."""
    options = {"sequence_length": sequence_length, "heldout_fraction": fraction, "seed": seed}
    assert len({DataConfig(**options), DataConfig(**options)}) == 1


def test_the_bundled_corpus_is_a_file_of_the_package():
    """It is found through the package, not through the working folder."""
    assert bundled_corpus_path().is_file()
