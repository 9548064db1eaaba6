"""The two ends of a channel: what a rank sends into, and what it receives from.

A link has one direction and keeps the order of its messages. Channels own what travels; which means carries it is known
only here and to whoever makes the links: a communicator, or memory that two ranks of one host share
(``chimera.runtime.shared_memory``).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from chimera.tensor.communicator import Communicator

__all__ = ["CommunicatorLink", "Link", "Transfer"]


class Transfer(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when the message's tensor is free again (of a send), or filled (of a receive).

        Raises:
            StalledError: the peer died, or did not take part within the time-out.
        """


class Link(Protocol):
    """This rank's end of a channel; the sending end is never asked to receive, nor the other to send."""

    @property
    def in_background(self) -> bool:
        """Whether a message travels on while both ends do something else."""

    def send(self, tensor: torch.Tensor) -> Transfer:
        """Start sending a contiguous tensor."""

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Start receiving the next message into a contiguous tensor of its size."""

    def abort(self) -> None:
        """Make a wait that another thread is in fail at once."""


@dataclass(frozen=True, slots=True)
class CommunicatorLink:
    """A channel over a communicator that may carry others, told apart by ``tag``.

    Attributes:
        communicator: over gloo or NCCL.
        peer: the other end's world rank.
        tag: the route; NCCL, where each channel has a communicator of its own, has none.
    """

    communicator: Communicator
    peer: int
    tag: int

    @property
    def in_background(self) -> bool:
        """Communicators have threads or streams of their own."""
        return True

    def send(self, tensor: torch.Tensor) -> Transfer:
        """Start sending a contiguous tensor."""
        return self.communicator.send(tensor, self.peer, self.tag)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Start receiving into a contiguous tensor."""
        return self.communicator.receive(tensor, self.peer, self.tag)

    def abort(self) -> None:
        """Make every operation on the communicator fail."""
        self.communicator.abort()
