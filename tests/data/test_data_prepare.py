"""Building datasets: the same bytes for any number of workers, nothing lost, nothing half-written."""

import json

import numpy as np
import pytest

from chimera.data import IndexedDataset, TextTokenizer, build_dataset, train_wordpiece
from chimera.data.prepare import tokenizer_path
from chimera.data.text import TextOptions
from chimera.errors import DataError

SENTENCES = [f"the {word} of the {other} is a {word}." for word in ("cat", "dog", "tree") for other in ("house", "sea")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece(SENTENCES * 3, vocab_size=40)


def lines_of(documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


def build(tmp_path, tokenizer, name="set", text=None, **options):
    path = tmp_path / "text.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    form = TextOptions(form="json", sentences=options.pop("sentences", "line"))
    return build_dataset([path], tmp_path / name, tokenizer=tokenizer, options=form, **options)


def test_workers_do_not_change_a_byte(tmp_path, tokenizer, monkeypatch):
    """One process and two write equal files, of many blocks."""
    monkeypatch.setattr("chimera.data.text.blocks._BLOCK_BYTES", 2000)
    text = lines_of(" ".join(SENTENCES[: 1 + number % 5]) for number in range(400))
    one = build(tmp_path, tokenizer, "one", text)
    two = build(tmp_path, tokenizer, "two", workers=2)
    assert one.dataset.num_documents == two.dataset.num_documents == 400
    for suffix in ("idx", "bin", "tokenizer.json"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_tokens_are_those_of_the_tokenizer(tmp_path, tokenizer):
    """Documents keep their order and sequences; the end is appended to the last sequence of each, not to empty ones."""
    texts = [f"{SENTENCES[0]}\n{SENTENCES[1]}", "", "\u200b", SENTENCES[2], f"{SENTENCES[3]}\n\u200b"]
    end = tokenizer.id_of("[SEP]")
    made = build(tmp_path, tokenizer, text=lines_of(texts), end_token=end)
    ids = tokenizer.encode(SENTENCES[:4])
    expected = [[ids[0], [*ids[1], end]], [], [], [[*ids[2], end]], [[*ids[3], end]]]
    dataset = made.dataset
    assert [[s.tolist() for s in dataset.document(number)] for number in range(5)] == expected
    assert (made.num_empty_documents, made.num_empty_sequences) == (2, 2)
    assert dataset.tokens.dtype == np.uint16
    assert TextTokenizer.from_json(tokenizer_path(dataset.prefix).read_text()).tokens() == tokenizer.tokens()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_in_the_middle_leaves_nothing(tmp_path, tokenizer, workers, monkeypatch):
    """The line is named, from whichever process; no file of the dataset remains."""
    monkeypatch.setattr("chimera.data.text.blocks._BLOCK_BYTES", 500)
    text = lines_of(SENTENCES * 20) + '{"body": "x"}\n' + lines_of(SENTENCES * 20)
    with pytest.raises(DataError, match=r"text\.jsonl: line 121 has no field 'text'"):
        build(tmp_path, tokenizer, text=text, workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_text_without_a_token_is_refused(tmp_path, tokenizer):
    """All documents filtered away is an error, with the options to look at."""
    with pytest.raises(DataError, match=r"no document with a token in .*text\.jsonl: 2 empty .*--form and --field"):
        build(tmp_path, tokenizer, text=lines_of(["", "\u200b"]))
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_progress_ends_at_the_end(tmp_path, tokenizer):
    """The bytes read reach those of the file."""
    seen = []
    build(tmp_path, tokenizer, text=lines_of(SENTENCES), report=seen.append)
    size = (tmp_path / "text.jsonl").stat().st_size
    assert (seen[-1].read_bytes, seen[-1].total_bytes, seen[-1].num_documents) == (size, size, len(SENTENCES))


def test_a_dataset_is_opened_by_either_name(tmp_path, tokenizer):
    """The prefix, the index and the data all name it."""
    build(tmp_path, tokenizer, text=lines_of(SENTENCES))
    assert {len(IndexedDataset(tmp_path / name)) for name in ("set", "set.idx", "set.bin")} == {len(SENTENCES)}
