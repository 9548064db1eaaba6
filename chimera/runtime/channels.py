"""Point-to-point messages between stages: posted receives and pending sends, with one owner.

A channel is a directed (source, destination, route) edge that carries activations and gradients in program order. The
owner takes a buffer when a receive is posted, hands it to the computation that needs it, keeps what is being sent until
the peer has it, and asserts at the end of a step that nothing is left. What the tensors mean is none of its business.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from chimera.runtime.ablation import OneByteLink
from chimera.runtime.groups import Channel, Groups
from chimera.runtime.links import Link, Transfer
from chimera.runtime.marks import Mark

__all__ = ["Channels", "Message", "Spec", "TensorSpec", "Tensors"]


class TensorSpec(NamedTuple):
    """Shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Spec = tuple[TensorSpec, ...]
Tensors = tuple[torch.Tensor, ...]


class Message(NamedTuple):
    """A message that was received: its tensors, and when it was there, where that is known."""

    tensors: Tensors
    arrived: Mark | None


class _Sending(NamedTuple):
    """Tensors being sent, and the works that end when they are."""

    works: list[Transfer]
    tensors: list[torch.Tensor]


class _Receiving(NamedTuple):
    """Tensors being received, the works that end when they are, and where that is noted, when."""

    works: list[Transfer]
    tensors: list[torch.Tensor]
    arrival: "Mark | Future[Mark] | None"


class Channels:
    """Owner of all messages of one rank.

    On CUDA each channel has its own stream: NCCL starts a transfer after the work queued on the stream that is current
    when it is issued, and a receive posted ahead must not wait for computations that need it.

    Args:
        groups: links by channel.
        depth: sends a channel may have pending before the next one waits for the oldest; the peer posts its receives
            ahead, so the oldest is normally gone by then.
        one_byte: whether a single byte travels in place of every tensor, and zeros arrive.
        mark: returns this moment; given to note when messages arrived that travel by themselves. On the CPU this takes
            a thread per channel.
    """

    def __init__(
        self, groups: Groups, *, depth: int = 4, one_byte: bool = False, mark: Callable[[], Mark] | None = None
    ) -> None:
        self._groups = groups
        self._depth = depth
        self._staged = groups.staged_on_cpu
        self._on_cuda = groups.device.type == "cuda" and not groups.staged_on_cpu
        self._links: dict[Channel, Link] = (
            {channel: OneByteLink(link) for channel, link in groups.channels.items()} if one_byte else groups.channels
        )
        self._mark = mark
        self._watchers: dict[Channel, ThreadPoolExecutor] = {}
        self._streams = {channel: self._stream() for channel in groups.channels} if self._on_cuda else {}
        self._pending: dict[Channel, deque[_Sending]] = {channel: deque() for channel in groups.channels}
        self._posted: dict[object, _Receiving] = {}

    def post(self, key: object, channel: Channel, spec: Spec) -> None:
        """Post the receive of message ``key`` and return at once."""
        link = self._links[channel]
        device = "cpu" if self._staged else self._groups.device
        with self._on_stream(channel):
            buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in spec]
            works = [link.receive(buffer) for buffer in buffers]
            arrival = self._watched(channel, works) if self._mark is not None and link.in_background else None
        self._posted[key] = _Receiving(works, buffers, arrival)

    def take(self, key: object) -> Message:
        """Wait for the message posted as ``key`` and hand its tensors over."""
        works, buffers, arrival = self._posted.pop(key)
        if isinstance(arrival, Future):
            # Another thread waits for these works; two must not.
            arrival = arrival.result()
        else:
            for work in works:
                # On NCCL the current stream waits, not the host.
                work.wait()
        if self._staged:
            buffers = [buffer.to(self._groups.device) for buffer in buffers]
        if self._on_cuda:
            for buffer in buffers:
                buffer.record_stream(torch.cuda.current_stream(self._groups.device))
        return Message(tuple(buffers), arrival)

    def send(self, channel: Channel, tensors: Tensors) -> None:
        """Start sending ``tensors`` and keep them until they are gone."""
        pending = self._pending[channel]
        if len(pending) >= self._depth:
            self._finish(channel, pending.popleft())
        link = self._links[channel]
        leaving = [(tensor.cpu() if self._staged else tensor).contiguous() for tensor in tensors]
        if self._on_cuda:
            self._streams[channel].wait_stream(torch.cuda.current_stream(self._groups.device))
        with self._on_stream(channel):
            works = [link.send(tensor) for tensor in leaving]
        pending.append(_Sending(works, leaving))

    def drain(self) -> None:
        """Wait until every pending send is gone, and assert that every posted receive was taken."""
        for channel, pending in self._pending.items():
            while pending:
                self._finish(channel, pending.popleft())
        assert not self._posted, f"receives posted and never taken: {list(self._posted)}"

    def close(self) -> None:
        """Let go of the threads that wait for messages; every message has been taken."""
        for watcher in self._watchers.values():
            watcher.shutdown(wait=False)

    def _watched(self, channel: Channel, works: list[Transfer]) -> "Mark | Future[Mark]":
        """Have the arrival noted: in the channel's stream, or by a thread, since gloo cannot be asked for it."""
        mark = self._mark
        assert mark is not None, "asked for"

        def arrival() -> Mark:
            for work in works:
                work.wait()
            return mark()

        if self._on_cuda:
            return arrival()
        if channel not in self._watchers:
            self._watchers[channel] = ThreadPoolExecutor(1, thread_name_prefix=f"channel {channel}")
        return self._watchers[channel].submit(arrival)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=self._groups.device)  # type: ignore[no-untyped-call]

    def _finish(self, channel: Channel, sent: _Sending) -> None:
        with self._on_stream(channel):
            for work in sent.works:
                work.wait()
        if self._on_cuda:
            for tensor in sent.tensors:
                tensor.record_stream(self._streams[channel])

    def _on_stream(self, channel: Channel) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[channel]) if self._on_cuda else nullcontext()
