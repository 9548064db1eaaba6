"""What other launchers say of a rank's place."""

import pytest

from chimera.errors import RunError, UsageError
from chimera.launch import Endpoint, Place, connected, place_from_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_no_launcher():
    """Without RANK and WORLD_SIZE the process starts its ranks itself, whatever else is set."""
    assert place_from_environment({"MASTER_ADDR": "node0", "LOCAL_RANK": "3"}) is None


def test_torchruns_variables():
    """The place is what the variables say; the local rank is the rank where nothing else is said."""
    where = {"store": Endpoint("node0", 29500), "spans_hosts": True}
    assert place_from_environment(TORCHRUN) == Place(rank=5, size=8, local_rank=1, local_size=4, **where)
    short = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    assert place_from_environment(short) == Place(rank=5, size=8, local_rank=5, local_size=8, **where)


def test_torchruns_agent():
    """Torchrun's agent holds the store for all attempts, says which this is, and is to live as long as its ranks."""
    agent = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first = place_from_environment(TORCHRUN | agent | {"RANK": "0"})
    assert (first.holds_store, first.store_outlives, first.restarts, first.ends_with_parent) == (False, True, 2, True)
    alone = place_from_environment(TORCHRUN | {"RANK": "0"})
    assert (alone.holds_store, alone.store_outlives, alone.restarts, alone.ends_with_parent) == (True, False, 0, False)


@pytest.mark.parametrize(
    "change",
    [{"LOCAL_WORLD_SIZE": "8"}, {"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "::1"}],
)
def test_ranks_of_one_host(change):
    """Where all ranks are on this host they need no other interface than loopback."""
    assert not place_from_environment(TORCHRUN | change).spans_hosts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"MASTER_ADDR": ""},
            r"sets RANK and WORLD_SIZE and MASTER_PORT but not MASTER_ADDR.*start it by torchrun, or",
        ),
        ({"WORLD_SIZE": ""}, r"but not WORLD_SIZE"),
        ({"RANK": "eight"}, r"variable RANK is 'eight'; needed: a whole number"),
        ({"RANK": "8"}, r"RANK is 8 with WORLD_SIZE 8; needed: a rank in 0…7"),
        ({"RANK": "-1"}, r"variable RANK is '-1'; needed: a whole number"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT is 0; needed: a port in 1…65535, the same on every rank"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT is 70000; needed"),
        ({"LOCAL_WORLD_SIZE": "x"}, r"variable LOCAL_WORLD_SIZE is 'x'"),
    ],
)
def test_a_half_set_environment_is_refused(change, message):
    """Variables that do not make up a place are named."""
    with pytest.raises(UsageError, match=message):
        place_from_environment(TORCHRUN | change)


def test_a_store_that_does_not_answer():
    """A rank that finds no job gives up after the time-out and says which option to raise."""
    place = Place(rank=1, size=2, local_rank=1, local_size=2, store=Endpoint("127.0.0.1", 1))
    with (
        pytest.raises(
            RunError, match=r"no job answers at 127.0.0.1:1: Connection refused; .*--runtime.timeout-s \(0.5\)"
        ),
        connected(place, timeout_s=0.5),
    ):
        pass
