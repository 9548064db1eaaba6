"""Where each field of an ``.idx`` file lies, and how the file is told from those that look like it.

Knows the bytes of the header and the length that a file with such a header has to have, so that counts which exceed the
file are refused before anything is allocated for them. Refuses to know the arrays' contents.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from chimera.errors import FormatError, UsageError

__all__ = [
    "HEADER_BYTES",
    "TOKEN_TYPES",
    "IndexHeader",
    "data_path",
    "dataset_prefix",
    "index_path",
    "read_header",
    "token_type_for",
]

_MAGIC: Final = b"MMIDIDX\0\0"
_LAZY_MAGIC: Final = b"TNTIDX\0\0"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<9sQBQQ")
HEADER_BYTES: Final = _HEADER.size

#: The code of each type of token in the header.
TOKEN_TYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_SMALL_VOCABULARY: Final = 65500  # Megatron's own bound, a little below what 16 bits hold


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The first 34 bytes of an index.

    Attributes:
        token_type: of the tokens in the data file.
        num_sequences: N.
        num_bounds: D, the document starts and the end of the last document; one more than there are documents.
        has_modes: whether a byte per sequence follows, as multimodal sets have it.
    """

    token_type: np.dtype[Any]
    num_sequences: int
    num_bounds: int
    has_modes: bool = False

    @property
    def lengths_at(self) -> int:
        """Byte at which the sequence lengths begin, i32[N]."""
        return HEADER_BYTES

    @property
    def offsets_at(self) -> int:
        """Byte at which the sequences' byte offsets begin, i64[N]."""
        return HEADER_BYTES + 4 * self.num_sequences

    @property
    def documents_at(self) -> int:
        """Byte at which the document starts begin, i64[D]."""
        return HEADER_BYTES + 12 * self.num_sequences

    @property
    def modes_at(self) -> int:
        """Byte at which the modes begin, i8[N], or the file ends."""
        return HEADER_BYTES + 12 * self.num_sequences + 8 * self.num_bounds

    def to_bytes(self) -> bytes:
        """Return the header as it stands in the file."""
        code = next(code for code, dtype in TOKEN_TYPES.items() if dtype == self.token_type)
        return _HEADER.pack(_MAGIC, _VERSION, code, self.num_sequences, self.num_bounds)


def token_type_for(vocab_size: int) -> np.dtype[Any]:
    """Return the type that holds the ids of a vocabulary: 16 bits below 65,500 tokens, else 32.

    >>> token_type_for(30522), token_type_for(65500)
    (dtype('uint16'), dtype('int32'))
    """
    return TOKEN_TYPES[8] if vocab_size < _SMALL_VOCABULARY else TOKEN_TYPES[4]


def dataset_prefix(path: str | Path) -> Path:
    """Return the common part of the two files' names, which may be given as either of them.

    >>> dataset_prefix("sets/wiki.idx").name, dataset_prefix("sets/wiki").name
    ('wiki', 'wiki')
    """
    path = Path(path).expanduser()
    return path.with_suffix("") if path.suffix in {".idx", ".bin"} else path


def index_path(prefix: Path) -> Path:
    """Return the name of the index."""
    return prefix.with_name(f"{prefix.name}.idx")


def data_path(prefix: Path) -> Path:
    """Return the name of the token file."""
    return prefix.with_name(f"{prefix.name}.bin")


def read_header(path: Path) -> IndexHeader:
    """Read an index's header and hold it against the file's length.

    Raises:
        UsageError: there is no such file.
        FormatError: it is no index of this format, or its counts do not fit its length.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist; give the common part of the names of a .bin and an .idx file, as "
            "'chimera data build' makes them"
        ) from None
    if head.startswith(_LAZY_MAGIC):
        raise FormatError(
            f"{path} is an index of the older lazy or cached format (TNTIDX), which has neither byte offsets nor "
            "documents; make the set again from its text with 'chimera data build'"
        )
    if not head.startswith(_MAGIC):
        raise FormatError(
            f"{path} is no Megatron index: it begins with {head[:9]!r}, needed: {_MAGIC!r}; give the .idx file that "
            "'chimera data build' or Megatron's preprocess_data.py made"
        )
    if len(head) < HEADER_BYTES:
        raise FormatError(f"{path} ends after {len(head)} bytes, inside its header of {HEADER_BYTES}; copy it again")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(head)
    if version != _VERSION:
        raise FormatError(f"{path} has version {version}; only version {_VERSION} is known")
    if code not in TOKEN_TYPES:
        raise FormatError(f"{path} has token type {code}; known: {', '.join(map(str, TOKEN_TYPES))}")
    header = IndexHeader(TOKEN_TYPES[code], num_sequences, num_bounds)
    if size == header.modes_at + num_sequences and num_sequences:
        return IndexHeader(header.token_type, num_sequences, num_bounds, has_modes=True)
    if size != header.modes_at:
        _refuse_length(path, header, size)
    if num_bounds < 1:
        raise FormatError(f"{path} has no document bounds; needed: at least the 0 at which the first document starts")
    return header


def _refuse_length(path: Path, header: IndexHeader, size: int) -> None:
    """Say what a file of a wrong length is."""
    if size == HEADER_BYTES - 8 + 12 * header.num_sequences:
        raise FormatError(
            f"{path} is an index of fairseq, which begins like Megatron's and has no documents; make the set again "
            "from its text with 'chimera data build'"
        )
    raise FormatError(
        f"{path} says {header.num_sequences:,} sequences and {header.num_bounds:,} document bounds, which take "
        f"{header.modes_at:,} bytes; the file has {size:,}: it is cut short, or was never finished; copy or make it "
        "again"
    )
