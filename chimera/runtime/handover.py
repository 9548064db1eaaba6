"""What computations leave for each other: on the same rank directly, to another one as messages.

Each result has one consumer, named by kind, stage and micro-batch; whoever takes it waits for its message where it
comes from elsewhere. Tensor-parallel ranks send a share each of what all of them have. Knows placement and channels;
what is computed is others' business.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Placement
from chimera.ir.timeline import Lane
from chimera.runtime.channels import Channels, Spec, Tensors
from chimera.runtime.recorder import Recorder
from chimera.runtime.run import Run
from chimera.runtime.shapes import gradient_spec
from chimera.runtime.shares import Shares

__all__ = ["Handed", "Handover", "microbatch_of"]

_Key = tuple[Kind, int, int]
"""The kind of the consumer, its stage and its micro-batch."""


def microbatch_of(action: Action) -> int:
    """Return the micro-batch of an action that has one."""
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return action.microbatch


class Handed(NamedTuple):
    """What a computation takes.

    Attributes:
        tensors: that were left here, or were sent to this rank.
        message: how to join what was sent, and to what; None for what was left here.
    """

    tensors: Tensors
    message: tuple[Shares, Spec] | None = None

    def whole(self) -> Tensors:
        """Return the whole tensors; all tensor-parallel ranks of the stage call this, in one order."""
        if self.message is None:
            return self.tensors
        shares, spec = self.message
        return shares.join(self.tensors, spec)


class Handover:
    """The results under way on one rank.

    Args:
        placement: gives the rank of every stage on every route.
        me: this pipeline rank.
        channels: to and from the others.
        shares: what each tensor-parallel rank sends of a message.
        recorder: of sends, and of waits for receives.

    Attributes:
        awaited: the pipeline rank whose message is waited for, and since when on the monotonic clock.
    """

    def __init__(self, placement: Placement, me: int, channels: Channels, shares: Shares, recorder: Recorder) -> None:
        self._routes = placement.routes
        self._me = me
        self._channels = channels
        self._shares = shares
        self._recorder = recorder
        self._last = placement.num_stages - 1
        self._route_of: Sequence[int] = ()
        self._specs: Sequence[dict[int, Spec]] = ()
        self.awaited: tuple[int, float] | None = None
        # What a computation left for a stage on this rank, and what waits to be sent, by the consumer it is for.
        self._here: dict[_Key, Tensors] = {}
        self._leaving: dict[_Key, Tensors] = {}
        # Where in the program each message was posted: the wait for it is recorded as that receive's.
        self._posted_at: dict[_Key, int] = {}

    def begin(self, run: Run) -> None:
        """Set the micro-batches that the next results are about."""
        self.awaited = None
        self._route_of = run.route_of
        self._specs = run.specs

    def finish(self) -> None:
        """Wait for sends under way, and assert that nothing was left behind."""
        self._channels.drain()
        assert not self._here, f"results never used: {list(self._here)}"
        assert not self._leaving, f"results never sent: {list(self._leaving)}"

    # Computations

    def give(self, kind: Kind, consumer: int, microbatch: int, tensors: Tensors) -> None:
        """Leave what the computation of ``kind`` on the stage ``consumer`` takes; none is beyond the first and last."""
        if not 0 <= consumer <= self._last:
            return
        near = self._routes[self._route_of[microbatch]][consumer] == self._me
        (self._here if near else self._leaving)[kind, consumer, microbatch] = tensors

    def take(self, kind: Kind, stage: int, producer: int, microbatch: int) -> Handed:
        """Return what ``producer`` left for ``stage``, waiting for its message where it is elsewhere."""
        if not 0 <= producer <= self._last:
            return Handed(())
        key = (kind, stage, microbatch)
        rank = self._routes[self._route_of[microbatch]][producer]
        if rank == self._me:
            return Handed(self._here.pop(key))
        start = self._recorder.mark()
        self.awaited = rank, time.monotonic()
        tensors, arrived = self._channels.take(key)
        self.awaited = None
        self._recorder.received(self._posted_at.pop(key), start, self._recorder.mark(), arrived)
        return Handed(tensors, (self._shares, self._spec(*key)))

    # Messages: a send names the stage that gives, a receive the stage that takes.

    def send(self, action: Action, position: int) -> None:
        """Send what the action's stage has left for the next stage of its direction."""
        kind, consumer = (Kind.F, action.stage + 1) if action.kind is Kind.SEND_F else (Kind.B, action.stage - 1)
        microbatch = microbatch_of(action)
        route = self._route_of[microbatch]
        start = self._recorder.mark()
        tensors = self._leaving.pop((kind, consumer, microbatch))
        sent = self._shares.divide(tensors, f"{kind.name} from stage {action.stage} to stage {consumer}")
        self._channels.send((self._me, self._routes[route][consumer], route), sent)
        self._recorder.add(position, Lane.SEND, start, self._recorder.mark())

    def post(self, action: Action, position: int) -> None:
        """Post the receive of what the action's stage takes from the stage before, in its direction."""
        microbatch = microbatch_of(action)
        route = self._route_of[microbatch]
        kind, producer = (Kind.F, action.stage - 1) if action.kind is Kind.RECV_F else (Kind.B, action.stage + 1)
        key = (kind, action.stage, microbatch)
        self._posted_at[key] = position
        spec = self._shares.spec(self._spec(*key))
        self._channels.post(key, (self._routes[route][producer], self._me, route), spec)

    def _spec(self, kind: Kind, stage: int, microbatch: int) -> Spec:
        """Return what a stage takes, as all of it is."""
        specs = self._specs[microbatch]
        return specs[stage - 1] if kind is Kind.F else gradient_spec(specs[stage])
