"""What it takes to join a Ray cluster: a head that answers, and the variables that Ray reads.

Ray is not imported here: it reads its environment when it is, and this module says what has to stand there.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from chimera.errors import RunError, UsageError
from chimera.launch.interfaces import interface_towards, is_loopback

__all__ = ["NOT_BY_UV", "RAY_PROGRAM", "environment_at", "require_cluster", "token_environment"]

RAY_PROGRAM: Final = (sys.executable, "-m", "ray.scripts.scripts")
"""Ray's command line, of the same environment as this."""
NOT_BY_UV: Final = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Below ``uv run`` Ray would otherwise start workers by uv too, in an environment that uv makes on each node."""
_ANSWER_S: Final = 5.0
_STATUS_S: Final = 25.0
_ELSEWHERE: Final = "192.0.2.1"
"""An address that is no host's (RFC 5737), to ask which interface leads out; nothing is sent there."""
_ON_LOOPBACK: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Unless this is 0, Ray takes 127.0.0.1 to mean the machine's address, and listens on all interfaces."""


def require_cluster(address: str) -> None:
    """See that a head of a cluster answers at ``address`` and takes our token; joining it would try for minutes.

    Raises:
        UsageError: it is not written host:port.
        RunError: none does, and why.
    """
    host, port = _parts(address)
    try:
        socket.create_connection((host, port), _ANSWER_S).close()
    except OSError as error:
        raise RunError(
            f"no Ray cluster answers at {address}: {error.strerror or error}; see with 'ray status' whether it runs, "
            "or leave --address out to have one started on this host"
        ) from error
    try:
        done = subprocess.run(
            [*RAY_PROGRAM, "status", "--address", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment_at(address),
            timeout=_STATUS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"what listens at {address} does not answer as the head of a Ray cluster does within {_STATUS_S:g} s; see "
            "which port its 'ray start' has printed"
        ) from None
    if done.returncode:
        # After a traceback comes the exception, its class with its modules before it.
        reason = (done.stdout.strip().splitlines() or ["no reason given"])[-1].rpartition("Error: ")[2]
        raise RunError(f"the Ray cluster at {address} does not take us: {reason}")


def environment_at(address: str) -> Mapping[str, str]:
    """Return the variables that have to be set before Ray is imported to join somebody's cluster at ``address``."""
    return {_ON_LOOPBACK: "0"} | NOT_BY_UV if _only_on_loopback(address) else NOT_BY_UV


def token_environment(host: str, token: Path) -> dict[str, str]:
    """Return the variables of a cluster on ``host`` that asks for the token in a file."""
    on_loopback = {_ON_LOOPBACK: "0"} if is_loopback(host) else {}
    # An empty token in the environment has no say over the one in the file.
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_TOKEN": "", **on_loopback}


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        hint = "; Ray's client is not supported, so start from a node of the cluster" if "://" in address else ""
        raise UsageError(f"--address {address!r}; needed: host:port of the cluster's head, such as 10.0.0.1:6379{hint}")
    return host.strip("[]"), int(port)


def _only_on_loopback(address: str) -> bool:
    """Return whether a head listens on this host's loopback interface, and nowhere else."""
    host, port = _parts(address)
    found = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    if not all(is_loopback(str(ip)) for ip in found):
        return False
    try:
        outer = interface_towards(_ELSEWHERE).address
    except RunError:
        return True
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.settimeout(_ANSWER_S)
        return probe.connect_ex((outer, port)) != 0
