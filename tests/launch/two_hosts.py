"""Two hosts with addresses of their own on this one machine, joined by a link that may be slow.

They are network namespaces, so nothing leaves the machine, and ranks in different ones share no memory. Needs root and
iproute2; a test that asks for them is skipped without.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["TwoHosts", "why_no_hosts"]

_FIRST, _SECOND = "10.77.0.1", "10.77.0.2"


def why_no_hosts():
    """Return what this machine lacks for namespaces, or None."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (iproute2)"
    if os.geteuid():
        return "needs root, for network namespaces"
    tried = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "network namespaces cannot be listed here"


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts: their namespaces, the interface that joins them and each one's address."""

    names: tuple[str, str]
    interfaces: tuple[str, str]
    addresses: tuple[str, str] = (_FIRST, _SECOND)

    @classmethod
    @contextmanager
    def up(cls, rate: str | None = None) -> Iterator["TwoHosts"]:
        """Make the hosts, with ``rate`` (as tc writes it, 200mbit) of the link each way, and take them down again."""
        number = os.getpid()
        hosts = cls((f"chimera-a-{number}", f"chimera-b-{number}"), (f"va{number}", f"vb{number}"))
        try:
            for name in hosts.names:
                _ip("netns", "add", name)
            (first, second), (one, other) = hosts.names, hosts.interfaces
            _ip("link", "add", one, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
            for name, interface, address in zip(hosts.names, hosts.interfaces, hosts.addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                _ip("-n", name, "link", "set", interface, "up")
                _ip("-n", name, "link", "set", "lo", "up")
                if rate is not None:
                    limit = ["tbf", "rate", rate, "burst", "32kb", "latency", "50ms"]
                    _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", interface, "root", *limit)
            yield hosts
        finally:
            for name in hosts.names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(
        self, host: int, argv: Sequence[str], environ: Mapping[str, str], **options: object
    ) -> "subprocess.Popen[str]":
        """Start a command on a host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *argv], env=dict(environ), text=True, **options
        )

    def start_ranks(
        self, argv: Sequence[str], environ: Mapping[str, str], *, per_host: int = 1, **options: object
    ) -> list["subprocess.Popen[str]"]:
        """Start ``argv`` as ``per_host`` ranks on each host, with the variables that torchrun sets, in rank order."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return [
            self.start(
                host,
                argv,
                {
                    **environ,
                    "RANK": str(host * per_host + local),
                    "WORLD_SIZE": str(2 * per_host),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(per_host),
                    "MASTER_ADDR": self.addresses[0],
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": self.interfaces[host],
                    "OMP_NUM_THREADS": "1",
                },
                **options,
            )
            for host in range(2)
            for local in range(per_host)
        ]


def _ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
