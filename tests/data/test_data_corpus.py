import bz2
import gzip
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera.data import bundled_corpus_path, read_segmented_text, split_documents
from chimera.data.corpus import parse_segmented_text
from chimera.errors import DataError

DOCUMENTS = [["It rained.", "Nobody went out."], ["Alone."], ["Élan vital.", "He said so.", "Why?"]]

sentences = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"], exclude_characters="\ufeff"), min_size=1
)
corpora = st.lists(st.lists(sentences, min_size=1, max_size=4), min_size=1, max_size=6).filter(
    lambda documents: any(len(document) > 1 for document in documents)
)


def segmented(documents, newline="\n"):
    return "".join(newline.join(document) + 2 * newline for document in documents)


@given(corpora)
def test_what_is_written_is_read(documents):
    """Tidy segmented text gives its documents back."""
    assert parse_segmented_text(segmented(documents).encode(), name="it") == documents


@given(corpora, st.data())
def test_untidy_text_is_read_as_what_it_means(documents, data):
    """Leading and repeated blank lines, spaces, CRLF, CR, byte-order marks and a missing end change nothing."""
    newline = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    blanks = st.lists(st.sampled_from(["", " ", "\t", "  \u3000", "\ufeff"]), max_size=3)
    spaces = st.sampled_from(["", " ", "\t ", "\u00a0"])
    lines = data.draw(blanks)
    for number, document in enumerate(documents):
        if number:
            lines += ["", *data.draw(blanks)]
        lines += [data.draw(spaces) + sentence + data.draw(spaces) for sentence in document]
    lines += data.draw(blanks)
    mark = data.draw(st.sampled_from(["", "\ufeff"]))
    assert parse_segmented_text((mark + newline.join(lines)).encode(), name="it") == documents


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_compressed_text_is_recognised_by_its_content(tmp_path, compress):
    """Gzip, xz and bzip2 are read whatever the file is called."""
    path = tmp_path / "corpus.txt"
    path.write_bytes(compress(segmented(DOCUMENTS).encode()))
    assert read_segmented_text(path) == DOCUMENTS
    assert read_segmented_text(str(path)) == DOCUMENTS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty", "one sentence per line", '"bundled"']),
        (b"\n \n\r\n", ["is empty"]),
        (
            b"One.\n\nTwo.\n\n",
            ["2 document(s)", "a blank line after every sentence makes every document a single"],
        ),
        (b"Good.\nBad \0 one.\n", ["NUL at line 2, byte 5", "binary or UTF-16", "iconv"]),
        ("Gut.\nSchön.\n".encode("latin-1"), ["byte 0xf6 at line 2, byte 4", "UTF-8"]),
        ("One.\nTwo.\n".encode("utf-16"), ["binary or UTF-16"]),
        (gzip.compress(segmented(DOCUMENTS).encode())[:-9], ["damaged or cut short", "copy it again"]),
        (lzma.compress(segmented(DOCUMENTS).encode())[:-9], ["damaged or cut short"]),
        (bz2.compress(segmented(DOCUMENTS).encode())[:-9], ["damaged or cut short"]),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, content, words):
    """Each kind of unusable corpus has a message with the file, the place and the remedy."""
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_segmented_text(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path):
    """A missing corpus and a folder are told apart."""
    with pytest.raises(DataError, match=r"nothing\.txt does not exist; segmented text has one sentence per line"):
        read_segmented_text(tmp_path / "nothing.txt")
    with pytest.raises(DataError, match="is a folder, a file is needed"):
        read_segmented_text(tmp_path)


def test_the_bundled_corpus_is_large_clean_english():
    """At least 1 MB of text, every document with two sentences, no mark-up and no numbering left."""
    documents = read_segmented_text(bundled_corpus_path())
    text = segmented(documents)
    assert len(text.encode()) > 6_000_000
    assert len(bundled_corpus_path().read_bytes()) < 2 << 20
    assert text.encode() == bz2.decompress(bundled_corpus_path().read_bytes())
    assert len(documents) == 1453
    assert min(map(len, documents)) >= 2
    assert not set(text) & set("_*[]{}<>|`\\#@~^")
    for leftover in ("Gutenberg", "CHAPTER", "Illustration:"):
        assert leftover not in text
    assert not [line for line in text.splitlines() if line[:1].isdigit()]


def test_the_bundled_corpus_states_origin_and_licence():
    """The README beside it names each source, where it was taken from, and that it is in the public domain."""
    readme = " ".join((bundled_corpus_path().parent / "README.md").read_text(encoding="utf-8").split())
    assert "Origin and licence" in readme
    assert "public domain" in readme
    for source in ("bible-kjv-text", "golang-1.19-src", "brotli", "r-cran-janeaustenr"):
        assert readme.count(f"`{source}`") >= 1


@given(st.integers(2, 300), st.floats(0.01, 0.99), st.integers(0, 2**63 - 1))
def test_every_document_is_on_exactly_one_side(num_documents, fraction, seed):
    """The split is a partition of the requested size, or an error that names the option."""
    num_heldout = round(fraction * num_documents)
    if not 0 < num_heldout < num_documents:
        with pytest.raises(DataError, match=r"data\.heldout_fraction"):
            split_documents(num_documents, heldout_fraction=fraction, seed=seed)
        return
    train, heldout = split_documents(num_documents, heldout_fraction=fraction, seed=seed)
    assert len(heldout) == num_heldout
    assert sorted([*train, *heldout]) == list(range(num_documents))
    # One of each run: no more than about two runs lie between neighbours.
    assert np.diff(heldout, prepend=0, append=num_documents - 1).max() <= 2 * -(-num_documents // num_heldout)


def test_the_split_follows_the_seed():
    """Equal seeds give equal splits, other seeds other ones."""
    splits = [tuple(split_documents(200, heldout_fraction=0.1, seed=seed)[1].tolist()) for seed in (0, 0, 1, 2)]
    assert splits[0] == splits[1]
    assert len(set(splits)) == 3
