"""The one executor: it walks a proved program and hands each instruction to the handler of its kind.

It knows no schedule, no stage and no message; where it is, is all there is to see of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chimera.ir.action import Instruction, Kind

__all__ = ["Executor", "Handlers"]

Handlers = Mapping[Kind | tuple[Kind, Kind], Callable[[Any], None]]
"""What each kind of action does, and each pair of kinds that is run together."""


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
