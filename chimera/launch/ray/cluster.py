"""The Ray cluster that a job runs on: one that is there, or one that is started here and stays until told to stop.

A cluster of ours sits on the loopback interface unless another is named, asks for a token that only its user can read,
and has no dashboard. A record, locked for as long as the cluster lives, says which one is ours, so that stopping
touches no other. Ray is not imported here: it reads its environment when it is, and this module says what has to stand
there.
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from chimera.errors import RunError, UsageError
from chimera.launch.interfaces import LOOPBACK, find_interface, interface_towards, is_loopback

__all__ = ["OwnCluster", "environment_for", "own_cluster", "require_cluster", "start_cluster", "stop_cluster"]

_START_S: Final = 90.0
_STOP_S: Final = 15.0
_ANSWER_S: Final = 5.0
_STATUS_S: Final = 25.0
_LOOK_S: Final = 0.1
_LONGEST_FOLDER: Final = 44
"""Characters of a path below which Ray's sockets fit into the 107 that the system allows."""
_SESSIONS: Final = "ray"
"""Folder of Ray's own within ours, which is closed to others: Ray opens its own to everybody."""
_LAST_LINES: Final = 12
_ELSEWHERE: Final = "192.0.2.1"
"""An address that is no host's (RFC 5737), to ask which interface leads out; nothing is sent there."""
_RAY: Final = (sys.executable, "-m", "ray.scripts.scripts")
"""Ray's command line, of the same environment as this."""
_ON_LOOPBACK: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Unless this is 0, Ray takes 127.0.0.1 to mean the machine's address, and listens on all interfaces."""
_BY_UV: Final = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Below ``uv run`` Ray would otherwise start workers by uv too, in an environment that uv makes on each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCluster:
    """A cluster that was started here.

    Attributes:
        address: of its head, as host:port.
        folder: of its sockets, logs and token, which only its user can read.
        process: number of the process that holds it.
    """

    address: str
    folder: Path
    process: int

    @property
    def token(self) -> Path:
        """The file with the token that it asks for."""
        return self.folder / "token"

    @property
    def host(self) -> str:
        """The address that it listens at."""
        return self.address.rpartition(":")[0]


def own_cluster() -> OwnCluster | None:
    """Return the cluster that was started on this host and still runs, or None.

    Raises:
        RunError: one is being started elsewhere and does not become ready.
    """
    with _opened_record() as record:
        return None if _lock(record) else _await_record(record)


def start_cluster(interface: str | None, *, cpus: float | None = None) -> OwnCluster:
    """Start a cluster of one node on this host and return it.

    Args:
        interface: that it listens on, by name, address or network; the loopback interface when not given.
        cpus: that its node offers; None lets Ray count.

    Raises:
        UsageError: there is no such interface, or no folder with a short enough name.
        RunError: Ray did not start; its last lines are told.
    """
    address = LOOPBACK if interface is None else find_interface(interface).address
    with _opened_record() as record:
        if not _lock(record):
            return _await_record(record)
        _sweep(record)
        folder = _new_folder()
        process = _start(address, folder, cpus, record)
        try:
            cluster = OwnCluster(address=_await_address(process, folder), folder=folder, process=process.pid)
            _write(record, cluster)
            # It outlives this process, and nobody waits for it.
            process.returncode = 0
        except BaseException:
            _end(process)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cluster


def stop_cluster() -> OwnCluster | None:
    """Stop the cluster that was started on this host, with whatever runs on it, and return it; None where none runs.

    Raises:
        RunError: it goes on running.
    """
    with _opened_record() as record:
        if _lock(record):
            _sweep(record)
            return None
        cluster = _await_record(record)
        for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            with suppress(ProcessLookupError):
                os.kill(cluster.process, number)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if _lock(record):
                    _sweep(record)
                    return cluster
                time.sleep(_LOOK_S)
    raise RunError(f"the Ray cluster's process {cluster.process} does not end; its folder is {cluster.folder}")


def environment_for(address: str, own: OwnCluster | None) -> Mapping[str, str]:
    """Return the variables that have to be set before Ray is imported to connect to ``address``."""
    if own is not None:
        return _own_environment(own.host, own.token) | _BY_UV
    return {_ON_LOOPBACK: "0"} | _BY_UV if _only_on_loopback(address) else _BY_UV


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
            [*_RAY, "status", "--address", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment_for(address, None),
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


def _own_environment(host: str, token: Path) -> dict[str, str]:
    on_loopback = {_ON_LOOPBACK: "0"} if is_loopback(host) else {}
    # An empty token in the environment has no say over the one in the file.
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_TOKEN": "", **on_loopback}


# The record


@contextmanager
def _opened_record() -> Iterator[IO[str]]:
    """Open the record of this host's cluster, which may be empty."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "chimera"
    home.mkdir(parents=True, exist_ok=True)
    # Of this host: a home may be shared by several.
    descriptor = os.open(home / f"ray-{socket.gethostname()}.json", os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as record:
        yield record


def _lock(record: IO[str]) -> bool:
    """Lock the record unless somebody else has; the process that holds the cluster inherits the lock."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(record: IO[str], cluster: OwnCluster) -> None:
    record.seek(0)
    record.truncate()
    json.dump({"address": cluster.address, "folder": str(cluster.folder), "process": cluster.process}, record)
    record.flush()


def _sweep(record: IO[str]) -> None:
    """Remove what a cluster that has ended left: its folder, and what stands in the record that this process locked."""
    with suppress(json.JSONDecodeError):
        record.seek(0)
        shutil.rmtree(json.load(record)["folder"], ignore_errors=True)
    record.seek(0)
    record.truncate()


def _await_record(record: IO[str]) -> OwnCluster:
    """Read what stands in a locked record, which whoever starts the cluster writes last."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        record.seek(0)
        with suppress(json.JSONDecodeError):
            told = json.load(record)
            return OwnCluster(address=told["address"], folder=Path(told["folder"]), process=told["process"])
        time.sleep(_LOOK_S)
    raise RunError(
        f"a Ray cluster is being started by another command, and is not ready after {_START_S:g} s; try later"
    )


# Ray's processes


def _new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="chimera-ray-"))
    excess = len(str(folder / _SESSIONS)) - _LONGEST_FOLDER
    if excess > 0:
        folder.rmdir()
        raise UsageError(
            f"{folder.parent} is too long a path for the sockets of Ray; set TMPDIR to a folder whose path is shorter "
            f"by {excess} characters"
        )
    descriptor = os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return folder


def _start(address: str, folder: Path, cpus: float | None, record: IO[str]) -> subprocess.Popen[bytes]:
    """Start the process that holds the cluster: all of Ray's daemons end with it."""
    words = ["start", "--head", "--block", "--node-ip-address", address, "--port", "0"]
    words += ["--temp-dir", str(folder / _SESSIONS)]
    words += ["--include-dashboard", "false", "--disable-usage-stats", "--no-monitor"]
    # These have fixed numbers otherwise, and a host may hold the clusters of several users.
    words += ["--ray-client-server-port", str(_free_port(address)), "--dashboard-agent-listen-port", "0"]
    words += [] if cpus is None else ["--num-cpus", f"{cpus:g}"]
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environ |= _own_environment(address, folder / "token")
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*_RAY, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            # Where nothing is in the way of its working folder, and Control-C in this terminal does not reach it.
            cwd=folder,
            start_new_session=True,
            pass_fds=[record.fileno()],
        )


def _await_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    written = folder / _SESSIONS / "ray_current_cluster"
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if written.exists() and (address := written.read_text(encoding="ascii").strip()):
            return address
        if process.poll() is not None:
            break
        time.sleep(_LOOK_S)
    lines = (folder / "output").read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    how = "was not ready in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise RunError("\n".join([f"'ray start' {how}; its last lines:", *(f"  {line}" for line in lines)]))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port(address: str) -> int:
    with closing(socket.create_server((address, 0))) as server:
        return int(server.getsockname()[1])
