"""Text files: forms, compressions and borders of blocks; what cannot be read is named by file and line."""

import bz2
import gzip
import json
import lzma
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.data.text import TextOptions, blocks, documents_of, form_of, read_blocks
from chimera.errors import DataError, UsageError

DOCUMENTS = [["One sentence.", "Zwei Sätze."], ["三つ。"], ["Four.", "Five.", "Six."]]
SEGMENTED = "".join("\n".join(document) + "\n\n" for document in DOCUMENTS)


def read(path, splitter=None, **options):
    chosen = TextOptions(**options)
    return list(chain.from_iterable(documents_of(block, chosen, splitter) for block in read_blocks(path, chosen)))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of seven bytes, so that every border is met."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 7)


def compressed(kind, data):
    if kind == "zst":
        zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
        half = len(data) // 2
        return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))  # two frames
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "plain": bytes}[kind](data)


@pytest.mark.parametrize("kind", ["plain", "gz", "bz2", "xz", "zst"])
def test_a_compression_is_known_by_its_content(tmp_path, kind):
    """Whatever the name, the same documents come out; the archive cut short is an error that names it."""
    data = compressed(kind, SEGMENTED.encode())
    (tmp_path / "text").write_bytes(data)
    assert read(tmp_path / "text") == DOCUMENTS
    if kind != "plain":
        (tmp_path / "text").write_bytes(data[:-5])
        with pytest.raises(DataError, match=r"text is compressed but damaged or cut short .*copy it again"):
            read(tmp_path / "text")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["a", "bb b", "ccc.", "ddddddddd"]), min_size=1, max_size=3), min_size=1),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", " ", "\t"]),
    st.integers(1, 40),
    st.booleans(),
)
def test_blocks_never_cut_a_document(tmp_path_factory, documents, newline, blank, size, ends):  # noqa: PLR0917
    """Segmented text gives the same documents for any size of block, line end and kind of blank line."""
    text = "".join(newline.join(document) + newline + blank + newline for document in documents)
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes((text if ends else text.rstrip()).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_BYTES", size)
        assert read(path) == documents


@pytest.mark.usefixtures("small_blocks")
def test_each_form_gives_its_documents(tmp_path):
    """Lines, JSON lines under any name of the field, and segmented text joined to whole documents."""
    (tmp_path / "a").write_text("one two\n\nthree four\n", encoding="utf-8")
    assert read(tmp_path / "a", form="lines", sentences="document") == [["one two"], [], ["three four"]]
    rows = [{"id": 1, "content": "erste Zeile\n zweite "}, {"content": ""}, {"content": "dritte"}]
    (tmp_path / "b").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert read(tmp_path / "b", form="json", field="content") == [["erste Zeile", "zweite"], [], ["dritte"]]
    (tmp_path / "c").write_text(SEGMENTED, encoding="utf-8")
    assert read(tmp_path / "c", sentences="document") == [[" ".join(document)] for document in DOCUMENTS]


def test_a_splitter_cuts_paragraphs(tmp_path):
    """Each line is split on its own, so no sentence spans a paragraph."""
    (tmp_path / "a").write_text("A b. C d.\n", encoding="utf-8")
    split = read(
        tmp_path / "a", lambda text: [part + "." for part in text.split(".")[:-1]], form="lines", sentences="split"
    )
    assert split == [["A b.", "C d."]]


def test_parquet_is_read_by_column(tmp_path):
    """A column of text in rows; another name is an error that lists the columns, a gap one that names the row."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"Text {number}." for number in range(1200)]
    parquet.write_table(pa.table({"id": range(1200), "body": texts}), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet", form="parquet", field="body") == [[text] for text in texts]
    with pytest.raises(DataError, match=r"t\.parquet has no column 'bdy' \(did you mean 'body'\?\); it has id, body"):
        read(tmp_path / "t.parquet", form="parquet", field="bdy")
    with pytest.raises(DataError, match="column 'id' holds int64; needed: text"):
        read(tmp_path / "t.parquet", form="parquet", field="id")
    parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "u.parquet")
    with pytest.raises(DataError, match=r"u\.parquet: row 2 has no 'text'"):
        read(tmp_path / "u.parquet", form="parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data[:-9])
    with pytest.raises(DataError, match="is no Parquet file, or damaged or cut short"):
        read(tmp_path / "t.parquet", form="parquet", field="body")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a"}\n{"txt": "b"}\n',
            r"line 2 has no field 'text' \(did you mean 'txt'\?\); it has txt: .*--field",
        ),
        ('{"text": "a"}\n\n["b"]\n', "line 3 is a JSON list; needed: one object per line"),
        ('{"text": "a"}\n{"text": 5}\n', "line 2: field 'text' is a JSON int; needed: text"),
        ('{"text": "a"}\n{"text"\n', r"line 2 is no JSON \("),
        ('{"text": "a\\ud83d"}\n', r"line 1: field 'text' has half a surrogate pair, \\ud83d"),
    ],
)
def test_faults_of_json_lines_are_named_by_line(tmp_path, content, message):
    """File, line and what to do."""
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=rf"a\.jsonl: {message}"):
        read(tmp_path / "a.jsonl", form="json")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\n\ntwo\n\nth\xe9ee\n", "is not UTF-8: byte 0xe9 at line 5, byte 3"),
        ("one\n".encode("utf-16"), "is not UTF-8: byte 0xff at line 1, byte 1|is binary or UTF-16"),
        (b"one\n\nt\0o\n", "is binary or UTF-16: NUL at line 3, byte 2"),
    ],
)
def test_other_encodings_are_named_by_line(tmp_path, content, message):
    """Lines are counted over all blocks."""
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt ({message})"):
        read(tmp_path / "a.txt")


def test_missing_files_and_folders_are_named(tmp_path):
    """Both are errors, not empty text."""
    with pytest.raises(DataError, match="nothing does not exist"):
        read(tmp_path / "nothing")
    with pytest.raises(DataError, match="is a folder; give the files in it"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "form"),
    [("a.jsonl.zst", "json"), ("a.b.txt.bz2", "segmented"), ("x.parquet", "parquet"), ("y.json", "json")],
)
def test_a_name_tells_the_form(name, form):
    """An ending of compression is passed over; a name that says nothing is an error that names the option."""
    assert form_of(Path(name)) == form
    with pytest.raises(UsageError, match=r"its name does not tell the form of text; give --form"):
        form_of(Path("data.gz"))
