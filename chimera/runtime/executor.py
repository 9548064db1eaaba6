"""The one executor: it walks a proved program and hands each action to the handler of its kind.

It knows no schedule, no stage and no message; where it is, is all there is to see of it.
"""

from collections.abc import Callable, Mapping, Sequence

from chimera.ir.action import Action, Kind

__all__ = ["Executor", "Handlers"]

Handlers = Mapping[Kind, Callable[[Action], None]]


class Executor:
    """Runs programs; ``position`` is the place of the action it is at, or None between programs."""

    def __init__(self) -> None:
        self.position: int | None = None

    def run(self, program: Sequence[Action], handlers: Handlers) -> None:
        """Run every action of ``program`` in order."""
        for position, action in enumerate(program):
            self.position = position
            handlers[action.kind](action)
        self.position = None
