"""Byte streams of files that may be compressed by gzip, bzip2, xz or Zstandard.

Knows a compression by what the file starts with; its name decides nothing. A damaged or truncated archive is an error
that names the file, never a shorter text. Refuses to know what the bytes mean.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Final

from chimera.errors import DataError

__all__ = ["TextStream", "open_text", "uncompressed"]

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    from chimera.data.text.zstd import zstd_reader

    return zstd_reader(raw)


_OPENERS: Final[dict[bytes, Callable[[IO[bytes]], IO[bytes]]]] = {
    b"\x1f\x8b": lambda raw: io.BufferedReader(gzip.GzipFile(fileobj=raw)),
    b"BZh": lambda raw: io.BufferedReader(bz2.BZ2File(raw)),
    b"\xfd7zXZ\x00": lambda raw: io.BufferedReader(lzma.LZMAFile(raw)),  # noqa: SIM115, closed with the file
    _ZSTD_MAGIC: _zstd,
}


class TextStream:
    """The bytes behind a compression, or those of a plain file; faults of an archive become ``DataError``."""

    def __init__(self, stream: IO[bytes], raw: IO[bytes], name: str) -> None:
        self._stream = stream
        self._raw = raw
        self._name = name

    def read(self, size: int = -1) -> bytes:
        """Read some bytes, or all that are left.

        Raises:
            DataError: the archive is damaged or cut short.
        """
        try:
            return self._stream.read(size)
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{self._name} is compressed but damaged or cut short ({error}); copy it again") from error

    @property
    def position(self) -> int:
        """Bytes of the file, compressed as it is, that have been read so far."""
        return self._raw.tell()


@contextmanager
def open_text(path: Path | Traversable) -> Iterator[TextStream]:
    """Open a file for reading its text's bytes.

    Raises:
        DataError: it is missing, a folder or unreadable, or compressed in a way that is not installed.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the files in it")
    try:
        raw = path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    with raw:
        yield uncompressed(raw, name=str(path))


def uncompressed(raw: IO[bytes], *, name: str) -> TextStream:
    """Return the bytes behind a compression, or the bytes themselves; ``name`` stands for the file in messages.

    Raises:
        DataError: the compression is not installed.
    """
    head = raw.read(6)
    raw.seek(0)
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    if opener is None:
        return TextStream(raw, raw, name)
    try:
        return TextStream(opener(raw), raw, name)
    except ImportError:
        raise DataError(
            f"{name} is compressed by Zstandard, which needs the package zstandard; install chimera-pipeline[data]"
        ) from None
