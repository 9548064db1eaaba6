"""What every test may ask for: the pool of rank processes. And what every test may count on: that Control-C works."""

import signal
from pathlib import Path

import pytest
from ranks import Ranks, warm_up

TESTS = Path(__file__).parent
STARTING = {"cli", "launch", "runtime", "train"}
"""Folders whose tests start ranks, themselves or by a command."""

# A shell starts what is to run in the background deaf to it, and so would be all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session):
    """Load what ranks need while the first tests run; the first to start ranks would load what it needs alone."""
    starting = any(item.path.parent.parent == TESTS and item.path.parent.name in STARTING for item in session.items)
    if starting and not session.config.option.collectonly:
        warm_up()


@pytest.fixture(scope="session")
def ranks():
    """Lend eight preloaded processes that act as the ranks of a group; see ``tests/ranks.py``."""
    pool = Ranks()
    yield pool
    pool.close()
