"""Indexed datasets: bytes against the format's worked example, and against megatron-core's own reader and writer."""

import hashlib
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera.data.indexed import IndexedDataset, IndexedWriter, merge_datasets
from chimera.data.indexed.layout import token_type_for
from chimera.errors import DataError, FormatError, UsageError

U16 = np.dtype("<u2")
EXAMPLE = [[[101, 7592, 102], [2088]], [], [[5]]]
IDX_DIGEST = "ca2723c021e4c1873db90ae1779c8004939356f0223d36b92a3533dc4656a3e1"
BIN_DIGEST = "4ef6cd6ef8d127b2ec98f3b799ea7ac8ec98b83e3ae36650a554a61f42a512a1"
MAGIC = b"MMIDIDX\0\0"

id_documents = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=6)


def write(prefix, documents, dtype=U16, **options):
    with IndexedWriter(prefix, dtype, **options) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def read(dataset):
    return [[s.tolist() for s in dataset.document(index)] for index in range(dataset.num_documents)]


def megatron():
    """Megatron-core's module, which warns about what else is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_worked_example_comes_out_to_the_byte(tmp_path):
    """Three sequences in three documents, the second one empty: 102 bytes of index and 10 of data, of known digests."""
    dataset = write(tmp_path / "set", EXAMPLE)
    assert (tmp_path / "set.idx").stat().st_size == 102
    assert (digest(tmp_path / "set.idx"), digest(tmp_path / "set.bin")) == (IDX_DIGEST, BIN_DIGEST)
    assert read(dataset) == EXAMPLE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


@settings(deadline=None, max_examples=40)
@given(id_documents)
def test_what_is_written_is_read(tmp_path_factory, documents):
    """Any documents, empty ones and empty sequences included, come back as they are."""
    folder = tmp_path_factory.mktemp("set")
    assert read(write(folder / "set", documents)) == documents


def test_sequences_are_views_of_the_file(tmp_path):
    """Nothing is copied: a change in the file is seen in a sequence read before."""
    dataset = write(tmp_path / "set", EXAMPLE)
    sequence = dataset[0]
    assert not sequence.flags.owndata
    assert not sequence.flags.writeable
    with (tmp_path / "set.bin").open("r+b") as file:
        file.write(b"\x07\x00")
    assert sequence.tolist() == [7, 7592, 102]


@pytest.mark.parametrize(("size", "expected"), [(65499, "uint16"), (65500, "int32")])
def test_tokens_take_16_bits_below_65500(size, expected):
    """The bound is Megatron's, not 2**16."""
    assert token_type_for(size) == np.dtype(expected)


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_reads_what_is_written_here(tmp_path, dtype):
    """Its reader gives equal tokens, lengths and documents."""
    theirs = megatron().IndexedDataset
    documents = [[[1, 2, 3], [4]], [], [[65000] * 50], [[7], [], [8, 9]]]
    write(tmp_path / "set", documents, np.dtype(dtype))
    dataset = theirs(str(tmp_path / "set"))
    sequences = [sequence for document in documents for sequence in document]
    assert [dataset[index].tolist() for index in range(len(dataset))] == sequences
    assert dataset.document_indices.tolist() == [0, 2, 2, 3, 6]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_what_megatron_writes_is_read_here(tmp_path, dtype):
    """Its builder's files are the same bytes as ours of the same documents, and read back equal."""
    theirs = megatron().IndexedDatasetBuilder
    documents = [[[1, 2, 3], [4]], [[65000] * 50], [[7], [8, 9]]]
    builder = theirs(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document([token for sequence in document for token in sequence], list(map(len, document)))
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert read(IndexedDataset(tmp_path / "theirs")) == documents
    write(tmp_path / "ours", documents, np.dtype(dtype))
    for suffix in ("idx", "bin"):
        assert digest(tmp_path / f"ours.{suffix}") == digest(tmp_path / f"theirs.{suffix}")


def test_offsets_beyond_two_gigabytes_are_read(tmp_path):
    """A sequence of more than 2**31 bytes, and one behind it, by memory map of a sparse file."""
    lengths = [(1 << 30) + 5, 3]
    with (tmp_path / "set.bin").open("wb") as file:
        file.truncate(2 * lengths[0])
        file.seek(2 * lengths[0])
        file.write(np.array([1, 2, 3], "<u2").tobytes())
    (tmp_path / "set.idx").write_bytes(
        struct.pack("<9sQBQQ", MAGIC, 1, 8, 2, 2)
        + np.array(lengths, "<i4").tobytes()
        + np.array([0, 2 * lengths[0]], "<i8").tobytes()
        + np.array([0, 2], "<i8").tobytes()
    )
    dataset = IndexedDataset(tmp_path / "set")
    assert len(dataset[0]) == lengths[0]
    assert dataset[0].nbytes > 1 << 31
    assert dataset[1].tolist() == [1, 2, 3]


@pytest.mark.long
def test_sequences_beyond_two_gigabytes_are_written(tmp_path):
    """Merging a sparse set of more than 2**31 bytes with another keeps offsets right, in constant memory."""
    test_offsets_beyond_two_gigabytes_are_read(tmp_path)
    write(tmp_path / "small", EXAMPLE)
    merged = merge_datasets([tmp_path / "set", tmp_path / "small"], tmp_path / "merged")
    assert [merged[index].tolist() for index in range(1, 5)] == [[1, 2, 3], *EXAMPLE[0], EXAMPLE[2][0]]
    assert merged.offsets[2] > 1 << 31


@settings(deadline=None, max_examples=20)
@given(st.lists(id_documents, min_size=2, max_size=4))
def test_merging_is_writing_one_after_another(tmp_path_factory, sets):
    """The merged files are, to the byte, those of a writer that was given all documents."""
    folder = tmp_path_factory.mktemp("sets")
    for number, documents in enumerate(sets):
        write(folder / f"part{number}", documents)
    merge_datasets([folder / f"part{number}" for number in range(len(sets))], folder / "merged")
    write(folder / "whole", [document for documents in sets for document in documents])
    for suffix in ("idx", "bin"):
        assert (folder / f"merged.{suffix}").read_bytes() == (folder / f"whole.{suffix}").read_bytes()


def test_an_error_leaves_nothing_behind(tmp_path):
    """Neither file, nor a temporary one, after a failure in the middle; an older dataset stays as it was."""
    write(tmp_path / "old", EXAMPLE)

    def fail(prefix, **options):
        with IndexedWriter(prefix, U16, **options) as writer:
            writer.add_document([[1]])
            raise DataError("in the middle")

    for prefix, options in ((tmp_path / "new", {}), (tmp_path / "old", {"overwrite": True})):
        with pytest.raises(DataError, match="in the middle"):
            fail(prefix, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.bin", "old.idx"]
    assert digest(tmp_path / "old.idx") == IDX_DIGEST


def test_a_dataset_is_not_replaced_unasked(tmp_path):
    """The name is taken: an error that names the file and the option."""
    write(tmp_path / "set", EXAMPLE)
    with pytest.raises(UsageError, match=r"set\.idx exists; .*--overwrite"):
        write(tmp_path / "set", [])
    assert read(write(tmp_path / "set", [], overwrite=True)) == []


def index_bytes(lengths=(3, 1, 1), offsets=(0, 6, 8), documents=(0, 2, 2, 3), *, code=8, version=1, magic=MAGIC):
    head = struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(documents))
    return head + np.array(lengths, "<i4").tobytes() + np.array((*offsets, *documents), "<i8").tobytes()


BAD = {
    "TNTIDX": (b"TNTIDX\0\0" + bytes(40), "older lazy or cached format"),
    "text": (b"once upon a time, and so on\n" * 4, "is no Megatron index: it begins with b'once upon'"),
    "empty": (b"", "is no Megatron index"),
    "header": (MAGIC + bytes(9), "ends after 18 bytes, inside its header"),
    "version": (index_bytes(version=2), "has version 2"),
    "code": (index_bytes(code=9), "has token type 9; known: 1, 2"),
    "cut": (index_bytes()[:-3], "which take 102 bytes; the file has 99"),
    "longer": (index_bytes() + bytes(5), "which take 102 bytes; the file has 107"),
    "no bounds": (struct.pack("<9sQBQQ", MAGIC, 1, 8, 0, 0), "has no document bounds"),
    "first document": (index_bytes(documents=(1, 2, 2, 3)), "documents run from sequence 1 to 3; needed: from 0 to 3"),
    "last document": (index_bytes(documents=(0, 2, 2, 2)), "needed: from 0 to 3"),
    "backward": (
        index_bytes(documents=(0, 2, 1, 3)),
        "document 1 starts at sequence 2 and the next one before it, at 1",
    ),
    "negative": (index_bytes(lengths=(3, -1, 1)), "sequence 1 has the length -1"),
    "offset": (index_bytes(offsets=(0, 6, 7)), "sequence 2 begins at byte 7, the lengths before it end at byte 8"),
    "start": (index_bytes(offsets=(2, 8, 10)), "sequence 0 begins at byte 2"),
    "data": (index_bytes(lengths=(3, 1, 2)), r"has 10 bytes, the lengths in its index take 12"),
    "fairseq": (
        struct.pack("<9sQBQ", MAGIC, 1, 8, 3) + np.array([3, 1, 1], "<i4").tobytes() + np.array([0, 6, 8]).tobytes(),
        "is an index of fairseq",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_only_look_alike_are_refused(tmp_path, case):
    """Each fault is named with the file; nothing is read as tokens that is none."""
    content, message = BAD[case]
    (tmp_path / "set.idx").write_bytes(content)
    (tmp_path / "set.bin").write_bytes(bytes.fromhex("6500a81d660028080500"))
    with pytest.raises(FormatError, match=rf"set\.(idx|bin).*{message}"):
        IndexedDataset(tmp_path / "set")


def test_missing_files_are_named(tmp_path):
    """Of both files, the one that is not there."""
    with pytest.raises(UsageError, match=r"set\.idx does not exist"):
        IndexedDataset(tmp_path / "set")
    (tmp_path / "set.idx").write_bytes(index_bytes())
    with pytest.raises(UsageError, match=r"set\.bin does not exist beside its index"):
        IndexedDataset(tmp_path / "set")


def test_counts_beyond_the_file_are_refused_before_anything_is_read(tmp_path):
    """An index that claims 2**60 sequences is refused within 50 MB; the limit would end the process otherwise."""
    (tmp_path / "set.idx").write_bytes(struct.pack("<9sQBQQ", MAGIC, 1, 8, 1 << 60, 1 << 60))
    code = (
        "import resource, sys\n"
        "from chimera.data.indexed import IndexedDataset\n"
        "from chimera.errors import FormatError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    IndexedDataset(sys.argv[1])\n"
        "except FormatError as error:\n    print('says 1,152,921,504,606,846,976 sequences' in str(error))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True\nTrue\n"


def test_sets_of_different_tokens_are_not_merged(tmp_path):
    """Sixteen and thirty-two bits mean different vocabularies."""
    write(tmp_path / "narrow", EXAMPLE)
    write(tmp_path / "wide", EXAMPLE, np.dtype("<i4"))
    with pytest.raises(UsageError, match=r"wide\.idx has tokens of type int32, .*narrow\.idx of uint16"):
        merge_datasets([tmp_path / "narrow", tmp_path / "wide"], tmp_path / "merged")
    with pytest.raises(UsageError, match="got 1 dataset to merge"):
        merge_datasets([tmp_path / "narrow"], tmp_path / "merged")
