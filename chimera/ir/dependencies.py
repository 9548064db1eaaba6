"""The one dependency relation of pipeline training, as data; checks, simulator, passes and runtime all ask it.

F(s) after F(s-1); B or I(s) after F(s) and after B or I(s+1); W(s) after I(s). All for one micro-batch. The relation
knows no ranks: whether a need crosses ranks, and so takes a message, is the placement's business.
"""

from enum import IntEnum
from typing import NamedTuple

from chimera.ir.action import Action, Kind

__all__ = ["MESSAGES", "NEEDS", "PHASES", "RECEIVED", "SENT", "Message", "Phase", "needs"]


class Phase(IntEnum):
    """The class of computations that can stand for each other: a B and an I both give the input's gradient."""

    FORWARD = 0
    GRADIENT = 1
    WEIGHT = 2


PHASES = {Kind.F: Phase.FORWARD, Kind.B: Phase.GRADIENT, Kind.I: Phase.GRADIENT, Kind.W: Phase.WEIGHT}

NEEDS = (
    (Phase.FORWARD, Phase.FORWARD, -1),
    (Phase.GRADIENT, Phase.FORWARD, 0),
    (Phase.GRADIENT, Phase.GRADIENT, +1),
    (Phase.WEIGHT, Phase.GRADIENT, 0),
)
"""Rows (phase, phase it needs, offset of the stage on which it needs it); a stage beyond either end needs nothing."""


class Message(NamedTuple):
    """How a need of another stage is met across ranks.

    ``phase`` is the result that is carried, ``sender`` where the sending stage lies from the receiving one; ``send``
    names the sending stage and ``receive`` the receiving one.
    """

    phase: Phase
    sender: int
    send: Kind
    receive: Kind


MESSAGES = (
    Message(Phase.FORWARD, -1, Kind.SEND_F, Kind.RECV_F),
    Message(Phase.GRADIENT, +1, Kind.SEND_B, Kind.RECV_B),
)
"""One row per need whose stage is another one's: activations go up the stages, gradients down."""

SENT = {message.send: message.phase for message in MESSAGES}
RECEIVED = {message.receive: message.phase for message in MESSAGES}


def needs(action: Action, num_stages: int) -> tuple[tuple[Phase, int], ...]:
    """Return the (phase, stage) pairs of the same micro-batch that must be done before a computation may start.

    >>> needs(Action(Kind.B, 1, 0), num_stages=4)
    ((<Phase.FORWARD: 0>, 1), (<Phase.GRADIENT: 1>, 2))
    >>> needs(Action(Kind.F, 0, 0), num_stages=4)
    ()
    """
    own = PHASES[action.kind]
    return tuple(
        (needed, action.stage + offset)
        for phase, needed, offset in NEEDS
        if phase is own and 0 <= action.stage + offset < num_stages
    )
