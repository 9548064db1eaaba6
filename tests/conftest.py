"""What every test may ask for: the pool of rank processes. And what every test may count on: that Control-C works."""

import signal

import pytest
from ranks import Ranks

# A shell starts what is to run in the background deaf to it, and so would be all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks():
    """Lend eight preloaded processes that act as the ranks of a group; see ``tests/ranks.py``."""
    pool = Ranks()
    yield pool
    pool.close()
