"""Messages between two ranks of one host, through memory that both map: one copy in, one copy out, no thread between.

The sender owns a file in memory that it cuts into slots. It copies a message into a free slot and writes a record of it
to a pipe; the receiver, woken by the record, copies the message out and marks the slot free. A send never waits: slots
are added as long as none is free, so there are as many as messages have ever been under way. The death of either end
closes the pipe, which the other end sees at once.

Processes of one host find each other by a socket name in Linux's abstract namespace, which ends at the host's network
namespace; only processes of the same user are let in.
"""

import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch.distributed.distributed_c10d import Store

from chimera.errors import RunError, StalledError

__all__ = ["Receiver", "Sender", "connect", "host_identity"]

_RECORD = struct.Struct("<IIQ")
"""A message in the pipe: its slot's first page, the slot's pages, the message's bytes. A pipe holds 4,096 of them."""
_GREETING = struct.Struct("<iii")
"""What the sender says as it connects: the channel."""
_PAGE = mmap.PAGESIZE
_HEADER = 64
"""Bytes ahead of a slot's message: one byte that says whether it is taken, and the rest to keep tensors aligned."""
_FREE, _TAKEN = 0, 1
_LOOK_S = 0.1
"""How often a wait looks whether it was aborted."""


def host_identity() -> str | None:
    """Return what processes have in common that can share memory: a running kernel, a network namespace and a user.

    None where the system lacks what it takes (it is not Linux).
    """
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if not hasattr(os, "memfd_create") or not boot.exists() or not network.exists():
        return None
    return f"{boot.read_text().strip()} {network.readlink()} {os.getuid()}"


@dataclass(slots=True)
class _Slot:
    """A mapped part of the file: a header, and room for a message."""

    first_page: int
    pages: int
    memory: mmap.mmap
    message: torch.Tensor = field(init=False)
    room: int = field(init=False)

    def __post_init__(self) -> None:
        self.message = torch.frombuffer(self.memory, dtype=torch.uint8)[_HEADER:]
        self.room = len(self.message)

    @classmethod
    def of_file(cls, file: int, first_page: int, pages: int) -> "_Slot":
        return cls(first_page, pages, mmap.mmap(file, pages * _PAGE, offset=first_page * _PAGE))


class _Sent:
    """A message that was copied: there is nothing to wait for."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""


_SENT = _Sent()


class Sender:
    """The sending end of a channel.

    Args:
        peer: the receiver's world rank.
    """

    in_background: Final = False
    """The two ends copy messages themselves."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._file = os.memfd_create("chimera-channel")
        weakref.finalize(self, os.close, self._file)
        self._end_page = 0
        self._slots: list[_Slot] = []
        self._records = -1

    def connect(self, listener_name: str, channel: tuple[int, int, int], timeout: timedelta) -> None:
        """Meet the receiver where it listens, and give it the file and the pipe's other end."""
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
            connection.settimeout(timeout.total_seconds())
            connection.connect("\0" + listener_name)
            read_end, self._records = os.pipe()
            weakref.finalize(self, os.close, self._records)
            try:
                socket.send_fds(connection, [_GREETING.pack(*channel)], [self._file, read_end])
            finally:
                os.close(read_end)

    def send(self, tensor: torch.Tensor) -> _Sent:
        """Copy the message to where the receiver finds it.

        Raises:
            StalledError: the receiver is gone.
        """
        size = tensor.numel() * tensor.element_size()
        slot = self._free_slot(size)
        slot.message[:size].copy_(_bytes(tensor))
        slot.memory[0] = _TAKEN
        try:
            os.write(self._records, _RECORD.pack(slot.first_page, slot.pages, size))
        except OSError as error:
            raise StalledError(f"sending to rank {self.peer} failed: it has closed the channel") from error
        return _SENT

    def receive(self, tensor: torch.Tensor) -> _Sent:
        """Never asked of this end."""
        raise AssertionError(f"a channel has one direction, and {tuple(tensor.shape)} was to go the other way")

    def abort(self) -> None:
        """Nothing waits here."""

    def _free_slot(self, size: int) -> _Slot:
        fitting = [slot for slot in self._slots if slot.room >= size and slot.memory[0] == _FREE]
        if fitting:
            return min(fitting, key=lambda slot: slot.pages)
        # A power of two, so that messages of about one size share slots; pages that are never written take no memory.
        pages = 1 << ((size + _HEADER - 1) // _PAGE).bit_length()
        os.ftruncate(self._file, (self._end_page + pages) * _PAGE)
        slot = _Slot.of_file(self._file, self._end_page, pages)
        self._end_page += pages
        self._slots.append(slot)
        return slot


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A receive that was posted; ``number`` counts the channel's messages."""

    receiver: "Receiver"
    number: int
    tensor: torch.Tensor

    def wait(self) -> None:
        """Wait for the message, and copy it out."""
        self.receiver.copy_out(self.number, self.tensor)


class Receiver:
    """The receiving end of a channel.

    Args:
        peer: the sender's world rank.
        file: descriptor of the sender's file; owned from now on.
        records: descriptor of the pipe's read end; likewise.
        timeout: how long a wait lasts.
    """

    in_background: Final = False

    def __init__(self, peer: int, file: int, records: int, timeout: timedelta) -> None:
        self.peer = peer
        self._file = file
        self._records = records
        for descriptor in (file, records):
            weakref.finalize(self, os.close, descriptor)
        self._timeout_s = timeout.total_seconds()
        self._poll = select.poll()
        self._poll.register(records, select.POLLIN)
        self._slots: dict[int, _Slot] = {}
        self._posted = 0
        self._arrived = 0
        self._unclaimed: dict[int, tuple[_Slot, int]] = {}
        self._aborted = False

    def receive(self, tensor: torch.Tensor) -> _Awaited:
        """Claim the channel's next message for ``tensor``."""
        self._posted += 1
        return _Awaited(self, self._posted - 1, tensor)

    def send(self, tensor: torch.Tensor) -> _Sent:
        """Never asked of this end."""
        raise AssertionError(f"a channel has one direction, and {tuple(tensor.shape)} was to go the other way")

    def copy_out(self, number: int, tensor: torch.Tensor) -> None:
        """Wait for message ``number`` and copy it into ``tensor``.

        Raises:
            StalledError: the sender died, sent nothing within the time-out, or sent another size.
        """
        while number not in self._unclaimed:
            self._unclaimed[self._arrived] = self._next_record()
            self._arrived += 1
        slot, size = self._unclaimed.pop(number)
        expected = tensor.numel() * tensor.element_size()
        if size != expected:
            raise StalledError(
                f"receiving from rank {self.peer} failed: it sent {size:,} bytes where {expected:,} were due"
            )
        _bytes(tensor).copy_(slot.message[:size])
        slot.memory[0] = _FREE

    def abort(self) -> None:
        """Make a wait that another thread is in fail."""
        self._aborted = True

    def _next_record(self) -> tuple[_Slot, int]:
        self._wait_for_record()
        record = os.read(self._records, _RECORD.size)
        if not record:
            raise StalledError(f"receiving from rank {self.peer} failed: it has closed the channel")
        first_page, pages, size = _RECORD.unpack(record)
        slot = self._slots.get(first_page)
        if slot is None:
            slot = self._slots[first_page] = _Slot.of_file(self._file, first_page, pages)
        return slot, size

    def _wait_for_record(self) -> None:
        end = time.monotonic() + self._timeout_s
        while not self._poll.poll(_LOOK_S * 1e3):
            if self._aborted:
                raise StalledError(f"receiving from rank {self.peer} failed: another rank has reported a failure")
            if time.monotonic() > end:
                raise StalledError(f"receiving from rank {self.peer} failed: no message within {self._timeout_s:g} s")


def connect(
    sending: Mapping[tuple[int, int, int], int],
    receiving: Mapping[tuple[int, int, int], int],
    *,
    rank: int,
    store: Store,
    timeout: timedelta,
) -> dict[tuple[int, int, int], Sender | Receiver]:
    """Make this rank's ends of channels to ranks of the same host; all ranks that have one call it.

    Args:
        sending: world rank of the receiver, for each channel that this rank sends into.
        receiving: world rank of the sender, for each channel that this rank receives from.
        rank: this world rank.
        store: of these ranks alone.
        timeout: how long to wait for them, and later for each message.

    Raises:
        RunError: a peer could not be reached.
    """
    made: dict[tuple[int, int, int], Sender | Receiver] = {}
    name = f"chimera-{secrets.token_hex(16)}"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.settimeout(timeout.total_seconds())
        listener.bind("\0" + name)
        listener.listen(max(1, len(receiving)))
        store.set(f"shared-memory/{rank}", name)
        try:
            for channel, peer in sending.items():
                sender = Sender(peer)
                sender.connect(store.get(f"shared-memory/{peer}").decode(), channel, timeout)
                made[channel] = sender
            while len(made) < len(sending) + len(receiving):
                made.update(_accepted(listener, receiving, timeout))
        except (OSError, RuntimeError) as error:
            missing = sorted({peer for channel, peer in (*sending.items(), *receiving.items()) if channel not in made})
            raise RunError(
                f"rank {rank} could not share memory with rank {', '.join(map(str, missing))} of this host: {error}; "
                "take the backend gloo, which does without"
            ) from error
    return made


def _accepted(
    listener: socket.socket, receiving: Mapping[tuple[int, int, int], int], timeout: timedelta
) -> Iterable[tuple[tuple[int, int, int], Receiver]]:
    """Take one connection; none comes of it where another user made it."""
    connection, _ = listener.accept()
    with closing(connection):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            return []
        connection.settimeout(timeout.total_seconds())
        greeting, descriptors, _, _ = socket.recv_fds(connection, _GREETING.size, 2)
    channel = _GREETING.unpack(greeting)
    file, records = descriptors
    return [(channel, Receiver(receiving[channel], file, records, timeout))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)
