"""What ``checkpoint export`` and ``import`` share: how large the files are that they write, and how far they are."""

import sys

from chimera.errors import UsageError

__all__ = ["bytes_of_a_file", "file_progress"]


def bytes_of_a_file(file_gib: float) -> int:
    """Return the most bytes of one file.

    Raises:
        UsageError: --file-gib is out of bounds.
    """
    if not 0.001 <= file_gib <= 1024:
        raise UsageError(f"--file-gib {file_gib:g}: needed: 0.001 to 1024 GiB")
    return round(file_gib * 2**30)


def file_progress(done: int, files: int) -> None:
    """Say that a file of several is written."""
    if files > 1:
        print(f"wrote file {done} of {files}", file=sys.stderr)
