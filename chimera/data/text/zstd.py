"""Zstandard streams, of one or several frames; this module stands for the package ``zstandard``.

The package's own reader ends silently where a frame is cut short, so frames are followed here.
"""

import io
from typing import IO, Final

import zstandard

__all__ = ["zstd_reader"]

_BLOCK: Final = 1 << 17


def zstd_reader(raw: IO[bytes]) -> IO[bytes]:
    """Return the uncompressed bytes of a stream; reading raises EOFError at a cut, OSError at damage."""
    return io.BufferedReader(_Frames(raw), buffer_size=_BLOCK)


class _Frames(io.RawIOBase):
    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            block = self._unused() or self._raw.read(_BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(block)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    _rest = b""

    def _unused(self) -> bytes:
        """Take what was read beyond the end of the last frame."""
        rest, self._rest = self._rest, b""
        return rest
