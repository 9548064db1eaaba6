"""The virtual device: layers whose computation is a wait, so that any schedule runs anywhere at its true pace.

Processes, messages, autograd and the whole runtime are real. Every micro-batch carries its own value, which each layer
checks on the way back and the loss at the end: a message that was swapped, lost or permuted shows at once.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from chimera.errors import RunError
from chimera.ir.action import Kind
from chimera.ir.costs import ResolvedCosts
from chimera.runtime.overlap import LayerBackward, LayerForward
from chimera.tensor.linear import DefersWeights

__all__ = ["PairedVirtualLayer", "VirtualLayer", "VirtualLoss", "oversleep_s", "virtual_batch", "virtual_layers"]


_TOLERANCE = 1e-3
_LONGEST_OVERSLEEP_S = 5e-4


def oversleep_s() -> float:
    """Return by how much this machine's sleep exceeds what is asked, the median of several; at most half a millisecond.

    Measured beforehand and slept less, so that a wait takes its cost: some 0.1 ms more on every action would pass for
    time that the runtime adds.
    """
    extra = []
    for _ in range(21):
        start = time.perf_counter()
        time.sleep(1e-3)
        extra.append(time.perf_counter() - start - 1e-3)
    return min(statistics.median(extra), _LONGEST_OVERSLEEP_S)


class VirtualLayer(nn.Module, DefersWeights):
    """One stage's worth of waiting.

    Args:
        number: the layer's place, from 0: what the layers before it added to the value.
        forward_s: seconds that its forward takes.
        backward_s: seconds that its whole backward takes.
        weight_grad_s: seconds of the gradient of its weights, which can wait until W; I takes what it leaves.
        total: the loss count of the whole step, by which gradients are divided.
        oversleep_s: what to sleep less; see ``oversleep_s``.
        gradient_bytes: size of weights that nothing computes with, whose gradients of zero are reduced all the same.
        checked: whether values say which micro-batch is there; not where messages are left out.
    """

    def __init__(
        self,
        number: int,
        *,
        forward_s: float,
        backward_s: float,
        total: float,
        weight_grad_s: float = 0.0,
        oversleep_s: float = 0.0,
        gradient_bytes: int = 0,
        checked: bool = True,
    ) -> None:
        super().__init__()
        self._oversleep_s = oversleep_s
        self._checked = checked
        self.number = number
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.weight_grad_s = weight_grad_s
        self.total = total
        self.weight = nn.Parameter(torch.ones(()))
        if gradient_bytes:
            self.bulk = nn.Parameter(torch.zeros(gradient_bytes // 4))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` plus one, some time later; the addition is part of that time."""
        start = time.perf_counter()
        increased = self._increased(tensor)
        self._wait(self.forward_s - (time.perf_counter() - start))
        return increased

    def _increased(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor + self.weight
        if out.requires_grad:
            identity = tensor[0, 0].item() - self.number
            out.register_hook(lambda gradient: self._backward(gradient, identity))  # type: ignore[no-untyped-call]
        return out

    def _backward(self, gradient: torch.Tensor, identity: float) -> None:
        """Check that the gradient is this micro-batch's, and wait as long as a backward takes."""
        got = gradient[0, 0].item() * self.total
        if self._checked and abs(got - identity) > _TOLERANCE:
            raise RunError(
                f"virtual layer {self.number} got the gradient of micro-batch {got:g} where that of {identity:g} was "
                "due: messages were swapped"
            )
        if self.splits:
            self._wait_back(self.backward_s - self.weight_grad_s)
            assert self.products is not None, "splits"
            self.products.queue(_WeightWait(self))
        else:
            self._wait_back(self.backward_s)

    @property
    def splits(self) -> bool:
        """Whether the gradient of the weights is to wait for W."""
        return self.products is not None and self.products.waits

    def _wait_back(self, seconds: float) -> None:
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        if seconds > self._oversleep_s:
            time.sleep(seconds - self._oversleep_s)
        # The rest is a few microseconds, or all of a wait too short to sleep.
        while time.perf_counter() < end:
            pass


class PairedVirtualLayer(VirtualLayer):
    """A virtual layer that can run a forward and a backward together.

    Args:
        pair_s: seconds of a pair by (the backward's layer, B or I); what is absent takes the sum of its two.
        gradient_bytes, checked, times: see ``VirtualLayer``.
    """

    def __init__(
        self,
        number: int,
        *,
        pair_s: Mapping[tuple[int, Kind], float],
        gradient_bytes: int = 0,
        checked: bool = True,
        **times: float,
    ) -> None:
        super().__init__(number, gradient_bytes=gradient_bytes, checked=checked, **times)
        self.pair_s = pair_s
        self._in_pair = False

    @classmethod
    def overlapped_forward_backward(cls, forward: LayerForward, backward: LayerBackward) -> torch.Tensor:
        """Do what both do, and wait for what that leaves of the pair's time."""
        start = time.perf_counter()
        ahead, back = forward.layer, backward.layer
        apart_s = ahead.forward_s + back.backward_s - (back.weight_grad_s if back.splits else 0.0)
        pair_s = ahead.pair_s.get((back.number, Kind.I if back.splits else Kind.B), apart_s)
        back._in_pair = True  # noqa: SLF001 - of this class
        try:
            backward.run()
        finally:
            back._in_pair = False  # noqa: SLF001
        increased: torch.Tensor = ahead._increased(*forward.inputs)  # noqa: SLF001
        ahead._wait(pair_s - (time.perf_counter() - start))  # noqa: SLF001
        return increased

    def _wait_back(self, seconds: float) -> None:
        if not self._in_pair:
            super()._wait_back(seconds)


class _WeightWait(NamedTuple):
    """The wait of one W."""

    layer: VirtualLayer

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.weight

    def start(self) -> None:
        """Nothing has to come from elsewhere."""

    def add(self) -> None:
        self.layer._wait(self.layer.weight_grad_s)  # noqa: SLF001 - of this module


class VirtualLoss:
    """Checks that the last output is the target's micro-batch, and sends its number back as the gradient."""

    def __init__(self, num_layers: int, *, checked: bool = True) -> None:
        self._num_layers = num_layers
        self._checked = checked

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[torch.Tensor, float]]:
        """Return one term whose gradient is the micro-batch's number everywhere."""
        identity = target.item()
        got = output[0, 0].item() - self._num_layers
        if self._checked and abs(got - identity) > _TOLERANCE:
            raise RunError(f"the loss got micro-batch {got:g} where {identity:g} was due: messages were swapped")
        return {"virtual": (output.sum() * identity, 1.0)}

    def counts(self, target: torch.Tensor) -> dict[str, float]:
        """One per micro-batch."""
        del target
        return {"virtual": 1.0}


def virtual_layers(
    costs: ResolvedCosts, num_microbatches: int, *, gradient_bytes: int | Sequence[int] = 0, checked: bool = True
) -> list[VirtualLayer]:
    """Return one layer per stage that takes what ``costs`` say, in seconds; I and W together take what B does.

    Where the costs have a time for any pair, all layers run pairs together, otherwise a forward, then a backward.
    Reductions are real: of ``gradient_bytes``, for all stages or one number each. Without ``checked`` values need not
    say which micro-batch is there, as where messages are left out.
    """
    durations = costs.duration
    extra = oversleep_s()
    layers = []
    for number in range(durations.shape[1]):
        times = {
            "forward_s": float(durations[Kind.F, number]),
            "backward_s": float(durations[Kind.B, number]),
            "weight_grad_s": float(durations[Kind.W, number]),
            "total": float(num_microbatches),
            "oversleep_s": extra,
        }
        size = gradient_bytes if isinstance(gradient_bytes, int) else gradient_bytes[number]
        pairs = {(back, kind): seconds for (ahead, back, kind), seconds in costs.pair.items() if ahead == number}
        layers.append(
            PairedVirtualLayer(number, pair_s=pairs, gradient_bytes=size, checked=checked, **times)
            if costs.pair
            else VirtualLayer(number, gradient_bytes=size, checked=checked, **times)
        )
    return layers


def virtual_batch(num_microbatches: int, message_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return micro-batches whose messages have ``message_bytes`` bytes, each with a value of its own, and targets."""
    numbers = range(1, num_microbatches + 1)
    elements = max(1, message_bytes // 4)
    return [torch.full((1, elements), float(n)) for n in numbers], [torch.tensor([float(n)]) for n in numbers]
