"""How the ranks of a job find each other: interfaces, the store, the file that tells where it is, and the roll call."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from chimera.errors import RunError, UsageError
from chimera.launch import (
    Endpoint,
    Place,
    connected,
    find_interface,
    hold_store,
    interface_towards,
    loopback,
    run_local,
)
from chimera.launch.interfaces import is_local_name
from chimera.launch.roll_call import call_roll
from chimera.launch.store import join_store, publish, read_published

TIMEOUT_S = 20.0


def test_an_interface_by_name_address_and_network():
    """The loopback interface is found by each of what it can be called."""
    here = loopback()
    assert here.address == "127.0.0.1"
    assert [find_interface(wanted) for wanted in (here.name, "127.0.0.1", "127.0.0.0/8")] == [here] * 3
    assert interface_towards("127.0.0.1") == here


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("eth77", r"this host has no interface 'eth77'.*; there are: \w+ \(127.0.0.1"),
        ("203.0.113.0/24", r"no interface of this host has an address in 203.0.113.0/24; there are: "),
        ("10.0.0.0/99", r"this host has no interface '10.0.0.0/99'"),
    ],
)
def test_an_interface_that_is_not_here(wanted, message):
    """What this host has instead is named."""
    with pytest.raises(UsageError, match=message):
        find_interface(wanted)


def test_a_host_nobody_knows():
    """A name without an address is named."""
    with pytest.raises(RunError, match=r"the host 'no-such-host.invalid' has no known address"):
        interface_towards("no-such-host.invalid")


def test_names_of_this_host():
    """What means this host wherever it is read is told from the way it is written."""
    assert [is_local_name(host) for host in ("localhost", "127.0.0.9", "::1", "node0", "10.0.0.1")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_published_store(tmp_path):
    """Others read where the store is as soon as it is written; after a failure nothing stays, the folder included."""
    path = tmp_path / "runs" / "new" / ".store.json"
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read_published, path, timeout_s=TIMEOUT_S)
        time.sleep(0.2)
        with suppress(RunError), publish(path, Endpoint("10.0.0.1", 4711)):
            assert reader.result(TIMEOUT_S) == Endpoint("10.0.0.1", 4711)
            raise RunError("nobody came")
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_nobody_publishes(tmp_path):
    """Who waits in vain is told which file did not come."""
    with pytest.raises(RunError, match=r"the first rank did not write \S+missing.json within 0.2 s.*--train.out"):
        read_published(tmp_path / "missing.json", timeout_s=0.2)


def test_the_roll_call_ignores_earlier_attempts():
    """Ranks that left their names in the same store are not waited for, and all of this attempt agree on its prefix."""
    with hold_store() as endpoint:
        stale = join_store(endpoint, timeout_s=TIMEOUT_S)
        stale.set("roll/here/1", "0123456789abcdef elsewhere")
        prefixes = [set(_roll(endpoint, 3)) for _ in range(2)]
    assert [len(found) for found in prefixes] == [1, 1]
    assert prefixes[0] != prefixes[1]


def _roll(endpoint, size):
    def call(rank):
        store = join_store(endpoint, timeout_s=TIMEOUT_S)
        return call_roll(store, rank, size, host="here", timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))


def test_ranks_that_do_not_come_are_named():
    """The first rank says who is missing, and where those are that came."""
    with hold_store() as endpoint:

        def come():
            call_roll(join_store(endpoint, timeout_s=TIMEOUT_S), 2, 4, host="n1", timeout_s=TIMEOUT_S)

        other = threading.Thread(target=come)
        other.start()
        store = join_store(endpoint, timeout_s=TIMEOUT_S)
        with pytest.raises(RunError, match=r"ranks 1, 3 of 4 did not join the job within 1 s; .*: 0 on n0, 2 on n1\."):
            call_roll(store, 0, 4, host="n0", timeout_s=1.0)
        other.join()


def test_eight_jobs_at_once_do_not_collide():
    """Jobs started at the same time on one host each find their own ranks."""
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(run_local, _meet, 2) for _ in range(8)]
        results = [job.result() for job in jobs]
    assert all(first == second for first, second in results)
    assert len({first for first, _ in results}) == 8


def _meet(place, _):
    with connected(place, timeout_s=60.0) as group:
        assert group.size() == 2
        return place.store.port


def test_a_port_in_use_names_its_variable():
    """Where the launcher chose the port, the message names the launcher's variable."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place = Place(0, 2, 0, 2, Endpoint("127.0.0.1", port), holds_store=True)
        message = rf"^port {port} on 127.0.0.1 cannot be used: Address already in use; set MASTER_PORT to another one$"
        with pytest.raises(RunError, match=message), connected(place, timeout_s=1.0):
            pass


@pytest.fixture(autouse=True)
def no_interface_is_named(monkeypatch):
    """Leave no trace of an interface that another test's ranks were bound to."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_an_address_of_another_host():
    """A first rank that is not where the launcher says cannot hold the store there."""
    place = Place(0, 2, 0, 1, Endpoint("203.0.113.1", 4711), holds_store=True, spans_hosts=True)
    with (
        pytest.raises(RunError, match=r"203.0.113.1 is no address of this host, .*first rank; set MASTER_ADDR"),
        connected(place, timeout_s=1.0),
    ):
        pass


def test_a_name_that_means_another_host_everywhere():
    """A first rank that others would look for on their own hosts says so."""
    place = Place(0, 2, 0, 1, Endpoint("localhost", 4711), holds_store=True, spans_hosts=True)
    with (
        pytest.raises(UsageError, match=r"MASTER_ADDR localhost is \S+ on its own host, where no other reaches it"),
        connected(place, timeout_s=1.0),
    ):
        pass


def test_a_port_of_two_minds():
    """An option that contradicts the launcher is refused."""
    place = Place(1, 2, 1, 2, Endpoint("127.0.0.1", 4711))
    with (
        pytest.raises(
            UsageError, match=r"--runtime.port is 4712, but the launcher has the ranks meet at 127.0.0.1:4711"
        ),
        connected(place, timeout_s=1.0, port=4712),
    ):
        pass


@pytest.mark.parametrize("interface", [None, "127.0.0.1"])
def test_a_named_variable_of_gloo_that_contradicts_is_refused(monkeypatch, interface):
    """GLOO_SOCKET_IFNAME names the interface too; together with another one by the option it is refused."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    place = Place(1, 2, 1, 2, Endpoint("127.0.0.1", 4711))
    message = "no interface 'eth77'" if interface is None else "is lo, but GLOO_SOCKET_IFNAME is eth77; leave one"
    with pytest.raises(UsageError, match=message), connected(place, timeout_s=1.0, interface=interface):
        pass
