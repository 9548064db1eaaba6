"""The data commands as a user meets them: from text to a dataset and back to text."""

import gzip
import json

import numpy as np
import pytest

from chimera.cli.main import main
from chimera.data import IndexedDataset, IndexedWriter

SENTENCES = [f"the {word} of the {other} is a {word}." for word in ("cat", "dog", "tree") for other in ("house", "sea")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with some text in two forms."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{one}\n{one}\n\n" for one in SENTENCES))
    rows = "".join(json.dumps({"body": one}) + "\n" for one in SENTENCES)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return tmp_path


def run(capsys, *words):
    code = main(["data", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_text_becomes_a_dataset_and_is_shown(folder, capsys):
    """A tokenizer is trained, text and JSON lines are built, joined, and shown as the text that went in."""
    code, out, _ = run(
        capsys, "tokenizer", "text.txt", "--kind", "wordpiece", "--vocab-size", "40", "--out", "new/tokenizer.json"
    )
    assert (code, out) == (0, "new/tokenizer.json: 40 tokens\n")
    common = ["--tokenizer", "new/tokenizer.json", "--workers", "1"]
    code, out, err = run(capsys, "build", "text.txt", "--out", "a", *common)
    tokens, size = len(IndexedDataset("a").tokens), (folder / "text.txt").stat().st_size
    said = f"a.idx: 6 documents, 12 sequences, {tokens} tokens of 2 bytes from {size} bytes of text\n"
    assert (code, out, err) == (0, said, "")
    code, out, _ = run(
        capsys, "build", "rows.jsonl.gz", "--field", "body", "--end-token", "[SEP]", "--out", "b", "--json", *common
    )
    built = json.loads(out)
    assert (code, built["documents"], built["sequences"], built["empty_documents"]) == (0, 6, 6, 0)
    code, out, _ = run(capsys, "merge", "a", "b", "--out", "c")
    assert code == 0
    assert out.startswith("c.idx: 12 documents, 18 sequences, ")
    code, out, _ = run(capsys, "inspect", "c", "--samples", "1", "--json")
    facts = json.loads(out)
    assert (code, facts["documents"], facts["sequences"], facts["token_type"]) == (0, 12, 18, "uint16")
    assert facts["first_text"][0].replace(" ", "") == SENTENCES[0].replace(" ", "")
    code, out, _ = run(capsys, "inspect", "c")
    assert code == 0
    assert "index and data agree" in out
    assert "the cat of the house is a cat" in out


def test_a_dataset_without_a_tokenizer_is_shown_as_ids(folder, capsys):
    """Foreign datasets have none beside them; a tokenizer that is too small for the ids is refused."""
    with IndexedWriter(folder / "set", np.dtype("<u2")) as writer:
        writer.add_document([[700, 8]])
    code, out, _ = run(capsys, "inspect", "set")
    assert code == 0
    assert "  0  700 8\n" in out
    assert "Give --tokenizer to see text" in out
    run(capsys, "tokenizer", "text.txt", "--kind", "wordpiece", "--vocab-size", "40", "--out", "tokenizer.json")
    code, _, err = run(capsys, "inspect", "set", "--tokenizer", "tokenizer.json")
    assert (code, "has the id 700, tokenizer.json only ids below 40" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["build", "text.txt", "rows.jsonl.gz", "--out", "a"],
            2,
            "the files are of different forms: text.txt (segmented)",
        ),
        (["build", "rows.jsonl.gz", "--out", "a"], 1, "rows.jsonl.gz: line 1 has no field 'text'; it has body"),
        (["build", "text.txt", "--field", "x", "--out", "a"], 2, "--field x is for JSON lines and Parquet"),
        (["build", "text.txt", "--sentences", "split", "--out", "a"], 2, "segmented text has one sentence per line"),
        (["build", "text.txt", "--language", "de", "--out", "a"], 2, "--language de is for --sentences split"),
        (["build", "text.txt", "--end-token", "</s>", "--out", "a"], 1, "has no token '</s>'"),
        (["build", "text.txt", "--out", "no/a"], 2, "no is no folder; make it first"),
        (["build", "none.txt", "--out", "a"], 1, "none.txt does not exist"),
        (["build", "text.txt", "--workers", "0", "--out", "a"], 2, "--workers 0; needed: 1 or more"),
        (["build", "text.data", "--out", "a"], 2, "its name does not tell the form of text; give --form"),
    ],
)
def test_wrong_input_is_named_and_leaves_nothing(folder, capsys, words, code, message):
    """The exit code, the cause, and no file of a dataset."""
    run(capsys, "tokenizer", "text.txt", "--kind", "wordpiece", "--vocab-size", "40", "--out", "tokenizer.json")
    workers = [] if "--workers" in words else ["--workers", "1"]
    got, out, err = run(capsys, *words, "--tokenizer", "tokenizer.json", *workers)
    assert (got, out, message in err) == (code, "", True), err
    assert sorted(path.name for path in folder.iterdir()) == ["rows.jsonl.gz", "text.txt", "tokenizer.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tokenizer", "--out", "t.json"], "training needs text files, --kind and --vocab-size"),
        (["tokenizer", "text.txt", "--take", "x", "--out", "t.json"], "--take takes a tokenizer as it is"),
        (["tokenizer", "text.txt", "--out", "text.txt"], "text.txt exists; give another name, or --overwrite"),
        (["merge", "a", "--out", "b"], "got 1 dataset to merge"),
        (["inspect", "text.txt"], "text.txt.idx does not exist"),
        (["inspect", "a", "--samples", "-1"], "--samples -1; needed: 0 or more"),
        (["wikipedia", "text.txt", "--out", "o", "--workers", "0"], "--workers 0; needed: 1 or more"),
    ],
)
def test_wrong_usage_ends_with_two(folder, capsys, words, message):
    """Nothing is printed as a result, and the cause is named."""
    assert folder.is_dir()
    code, out, err = run(capsys, *words)
    assert (code, out, message in err) == (2, "", True), err
