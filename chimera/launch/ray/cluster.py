"""A Ray cluster of ours: started on this host for a job, it stays until told to stop.

It sits on the loopback interface unless another is named, asks for a token that only its user can read,
and has no dashboard. A record, locked for as long as the cluster lives, says which one is ours, so that stopping
touches no other.
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from chimera.errors import RunError, UsageError
from chimera.launch.interfaces import LOOPBACK, find_interface
from chimera.launch.ray.joining import NOT_BY_UV, RAY_PROGRAM, environment_at, token_environment

__all__ = ["OwnCluster", "environment_for", "own_cluster", "start_cluster", "stop_cluster"]

_START_S: Final = 90.0
_STOP_S: Final = 15.0
_LOOK_S: Final = 0.1
_LONGEST_FOLDER: Final = 44
"""Characters of a path below which Ray's sockets fit into the 107 that the system allows."""
_SESSIONS: Final = "ray"
"""Folder of Ray's own within ours, which is closed to others: Ray opens its own to everybody."""
_LAST_LINES: Final = 12


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
    return environment_at(address) if own is None else token_environment(own.host, own.token) | NOT_BY_UV


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
    environ |= token_environment(address, folder / "token")
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*RAY_PROGRAM, *words],
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
