"""A job's store in a process of its own, for a rank that has to hold it.

A stopped rank would otherwise stop the store, and with it every rank that asks there what the others are doing; a dead
one would take the store along before they could. The process ends with the job, or a few seconds after the rank has
died.
"""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from chimera.launch.store import Endpoint, listening, serve

__all__ = ["hold_store_apart"]

_DONE: Final = b"."
_OUTLIVES_S: Final = 5.0
"""How long the store outlives a rank that failed: survivors gather what every rank was doing."""


@contextmanager
def hold_store_apart(address: str, port: int, *, option: str) -> Iterator[Endpoint]:
    """Hold a job's store in another process and yield where it is; options and errors are those of ``hold_store``."""
    listener = listening(address, port, option)
    endpoint = Endpoint(address, listener.getsockname()[1])
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Python warns of locks that other threads may hold at this moment; the new process asks for none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        try:
            _keep_only(listener.fileno(), read_end)
            with serve(listener, endpoint):
                # Without a word the rank has failed or died, and others may ask what it was doing.
                if os.read(read_end, 1) != _DONE:
                    time.sleep(_OUTLIVES_S)
        finally:
            # Not through the rank's own clean-up, a copy of which is here.
            os._exit(0)
    os.close(read_end)
    listener.close()
    try:
        yield endpoint
        with suppress(BrokenPipeError):
            os.write(write_end, _DONE)
    finally:
        os.close(write_end)


def _keep_only(*kept: int) -> None:
    """Let go of what was open in the rank: its input and output, which others wait to be closed, and its devices."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
