"""What every test may ask for: the pool of rank processes."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Lend eight preloaded processes that act as the ranks of a group; see ``tests/ranks.py``."""
    pool = Ranks()
    yield pool
    pool.close()
