"""What communication costs, found by leaving it out: a single byte travels in place of activations or gradients.

Who sends what to whom and when stays as it is, so that only the volume goes; the experiment of Narayanan et al. (SC'21)
and of Li and Hoefler (SC'21). What arrives is zeros, and gradients stay what this rank had: nothing is learned.
Collectives that keep ranks in step, such as counts and losses, are untouched.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from chimera.runtime.links import Link, Transfer
from chimera.tensor.communicator import Communicator, Pending

__all__ = ["ABLATIONS", "Ablation", "GradientCommunicator", "OneByteCommunicator", "OneByteLink"]

Ablation = Literal["none", "p2p", "allreduce", "all"]
"""What is left out: nothing, activations and their gradients between stages, gradient reductions, or both."""

ABLATIONS: Final[dict[Ablation, tuple[bool, bool]]] = {
    "none": (False, False),
    "p2p": (True, False),
    "allreduce": (False, True),
    "all": (True, True),
}
"""Whether messages are left out, and whether reductions are."""


@dataclass(frozen=True, slots=True)
class OneByteLink:
    """A link that carries one byte per message.

    Attributes:
        link: what carries it.
    """

    link: Link

    @property
    def in_background(self) -> bool:
        """As the link."""
        return self.link.in_background

    def send(self, tensor: torch.Tensor) -> Transfer:
        """Start sending a byte."""
        return self.link.send(_bytes_like(tensor, 1))

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Fill ``tensor`` with zeros, and start receiving a byte beside it."""
        tensor.zero_()
        return self.link.receive(_bytes_like(tensor, 1))

    def abort(self) -> None:
        """Make a wait that another thread is in fail at once."""
        self.link.abort()


@dataclass(frozen=True, slots=True)
class OneByteCommunicator:
    """The replicas of parameters, who give one another a byte each in place of gradients and weights.

    Attributes:
        communicator: of them all.
    """

    communicator: Communicator

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' world ranks, ascending."""
        return self.communicator.ranks

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing a byte; ``tensor`` stays as it is."""
        return self.communicator.all_reduce(_bytes_like(tensor, 1))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Start summing a byte per member; ``output`` stays as it is."""
        return self.communicator.reduce_scatter(_bytes_like(output, 1), _bytes_like(tensor, len(self.ranks)))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Start gathering a byte of each member; ``output`` stays as it is."""
        return self.communicator.all_gather(_bytes_like(output, len(self.ranks)), _bytes_like(tensor, 1))


GradientCommunicator = Communicator | OneByteCommunicator
"""What sums gradients and gathers weights."""


def _bytes_like(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=tensor.device)
