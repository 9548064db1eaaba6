"""The one executor: it walks a proved program and hands each instruction to the handler of its kind.

It knows no schedule, no stage and no message; where it is, is all there is to see of it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from chimera.ir.action import Instruction, Kind

__all__ = ["Executor", "Handlers", "Observer", "observed"]

Handlers = Mapping[Kind | tuple[Kind, Kind], Callable[[Any], None]]
"""What each kind of action does, and each pair of kinds that is run together."""

Observer = Callable[[Instruction], AbstractContextManager[object]]
"""Gives the context that an instruction is run in, such as a range in another tool's trace."""


def observed(handlers: Handlers, observer: Observer) -> Handlers:
    """Return handlers that do the same inside the observer's contexts."""

    def inside(handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle(instruction: Any) -> None:
            with observer(instruction):
                handler(instruction)

        return handle

    return {kind: inside(handler) for kind, handler in handlers.items()}


class Executor:
    """Runs programs; ``position`` is the place of the instruction it is at, or None between programs."""

    def __init__(self) -> None:
        self.position: int | None = None

    def run(self, program: Sequence[Instruction], handlers: Handlers) -> None:
        """Run every instruction of ``program`` in order."""
        for position, action in enumerate(program):
            self.position = position
            handlers[action.kind](action)
        self.position = None
