"""Two hosts with addresses of their own on this machine: network namespaces joined by a virtual cable.

What runs on one of them sees only its own interfaces, so messages between the two go over the network. It needs root
and iproute2; who asks for it without them is told what is missing.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager

__all__ = ["ADDRESSES", "NETWORK", "missing", "two_hosts"]

NETWORK = "10.213.77.0/24"
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def missing():
    """Return what keeps hosts from being made here, or None."""
    if lacking := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(lacking)} not installed (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces are made as root"
    name = f"chimera-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_hosts(rate=None):
    """Make the hosts and yield, for each, the words that a command on it begins with.

    With ``rate``, as tc writes it (200mbit), the cable carries that much each way.
    """
    names = [f"chimera-{letter}-{os.getpid()}" for letter in "ab"]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", "ch-a", "netns", names[0], "type", "veth", "peer", "name", "ch-b", "netns", names[1])
        for name, address, cable in zip(names, ADDRESSES, ("ch-a", "ch-b"), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate is not None:
                shape = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "50ms"]
                _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", cable, *shape)
        yield [["ip", "netns", "exec", name] for name in names]


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)
