"""Network interfaces of this host, and the one that a job's ranks meet over.

Whatever listens is bound to the address of one interface, never to all: the loopback interface where all ranks are on
one host, else the one that the user names, or the one that leads to where the ranks meet. Nothing here opens a
connection.
"""

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import psutil

from chimera.errors import RunError, UsageError, nearest_names

__all__ = [
    "LOOPBACK",
    "Interface",
    "address_of",
    "find_interface",
    "interface_towards",
    "is_local_name",
    "is_loopback",
    "loopback",
]

LOOPBACK: Final = "127.0.0.1"
_ANY_PORT: Final = 9
"""Of a datagram socket that sends nothing; it is only asked which way it would."""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: its name, and the address that it is reached at."""

    name: str
    address: str


def loopback() -> Interface:
    """Return the interface that only processes of this host reach."""
    for name, addresses in _addresses().items():
        if LOOPBACK in addresses:
            return Interface(name, LOOPBACK)
    raise RunError(f"no network interface of this host has the address {LOOPBACK}; bring the loopback interface up")


def find_interface(wanted: str) -> Interface:
    """Return the interface that ``wanted`` names.

    Args:
        wanted: a name such as eth0, one of its addresses, or a network such as 10.0.0.0/8, of which this host's
            interface is meant; the last fits hosts whose interfaces have different names.

    Raises:
        UsageError: this host has none, or several fit.
    """
    all_addresses = _addresses()
    if wanted in all_addresses:
        if not all_addresses[wanted]:
            raise UsageError(f"the interface {wanted!r} has no address; {_known(all_addresses)}")
        return Interface(wanted, all_addresses[wanted][0])
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        raise UsageError(
            f"this host has no interface {wanted!r}{nearest_names(wanted, all_addresses)}; {_known(all_addresses)}"
        ) from None
    fitting = [
        Interface(name, address)
        for name, addresses in all_addresses.items()
        for address in addresses
        if ipaddress.ip_address(address) in network
    ]
    if not fitting:
        raise UsageError(f"no interface of this host has an address in {wanted}; {_known(all_addresses)}")
    if len({interface.name for interface in fitting}) > 1:
        names = " and ".join(f"{found.name} ({found.address})" for found in fitting)
        raise UsageError(f"{names} have addresses in {wanted}; name one of the interfaces")
    return fitting[0]


def interface_towards(host: str) -> Interface:
    """Return the interface that messages to ``host`` leave through; for a host's own address, the one that has it.

    Raises:
        RunError: the host is unknown, or no way leads there.
    """
    target = address_of(host)
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((target, _ANY_PORT))
            source = str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(
            f"no interface of this host leads to {host} ({target}): {error.strerror or error}; set --runtime.interface "
            "to one that does"
        ) from error
    for name, addresses in _addresses().items():
        if source in addresses:
            return Interface(name, source)
    if is_loopback(source):
        return loopback()
    raise RunError(
        f"messages to {host} ({target}) leave from {source}, which no interface of this host names as its own; set "
        "--runtime.interface to the one that is meant"
    )


def address_of(host: str) -> str:
    """Return the first numeric address of ``host``, which may be one itself.

    Raises:
        RunError: nobody knows the name.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise RunError(f"the host {host!r} has no known address: {error.strerror or error}") from error


def is_loopback(address: str) -> bool:
    """Return whether a numeric address means the host that uses it, whichever that is."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_local_name(host: str) -> bool:
    """Return whether ``host`` means the host that uses it by the way it is written; nobody is asked for names."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def _addresses() -> Mapping[str, list[str]]:
    """Return the addresses of every interface, version 4 first, those that only work on their own link left out."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        given = [
            (entry.family, entry.address) for entry in entries if entry.family in {socket.AF_INET, socket.AF_INET6}
        ]
        found[name] = [address for _, address in sorted(given) if "%" not in address]
    return found


def _known(all_addresses: Mapping[str, list[str]]) -> str:
    named = [f"{name} ({', '.join(addresses)})" for name, addresses in all_addresses.items() if addresses]
    return f"there are: {', '.join(named)}"
