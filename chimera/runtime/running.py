"""``Running``: the program that a rank is in, how far it is, and what it says of that to others.

It runs programs and knows where in them this rank is, so that the last words of a job can say it. What actions do and
which programs there are is others' business.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from chimera.errors import StalledError
from chimera.ir.schedule import Schedule
from chimera.runtime.actions import Actions
from chimera.runtime.executor import Executor, Handlers, Observer, observed
from chimera.runtime.failure import stalled
from chimera.runtime.groups import Groups
from chimera.runtime.run import Run
from chimera.runtime.watch import UNDER_WAY, Here, Watch
from chimera.tensor.randomness import preserved_generators

__all__ = ["Running"]


class Running:
    """Runs this rank's part of one program after another.

    Args:
        schedule: the first program; nothing runs yet.
        groups, executor, actions: this rank's parts.

    Attributes:
        schedule: the latest program.
        watch: what publishes this rank's position.
        observer: gives the context that each instruction is run in; None for none.
    """

    def __init__(self, schedule: Schedule, groups: Groups, executor: Executor, actions: Actions) -> None:
        self.schedule = schedule
        self._groups = groups
        self._executor = executor
        self._actions = actions
        self.observer: Observer | None = None
        self.watch = Watch(groups.store, groups.rank, groups.size, here=self._here, end_waits=groups.abort)

    def execute(self, run: Run, handlers: Handlers) -> None:
        """Run the program over the micro-batches of ``run``, and wait for what it leaves under way."""
        program = self.schedule.actions[self._groups.pipeline_rank]
        self._actions.begin(run, program)
        self._executor.run(program, handlers if self.observer is None else observed(handlers, self.observer))
        self.watch.activity += UNDER_WAY
        self._actions.finish()

    @contextmanager
    def watched(self, activity: str, schedule: Schedule | None = None) -> Iterator[None]:
        """Say what this rank does meanwhile, leave the caller's random streams alone, and report a lost peer.

        Args:
            activity: in words.
            schedule: the program that is next; the latest one where this is no program.
        """
        if schedule is not None:
            self.schedule = schedule
        self.watch.activity = activity
        try:
            with preserved_generators(self._groups.device):
                yield
        except StalledError as error:
            raise stalled(str(error), self._groups, self.watch, self.schedule) from error
        self.watch.activity = "between steps"

    def _here(self) -> Here:
        """Return this rank's place in its program; asked from another thread."""
        position, program = self._executor.position, self.schedule.actions[self._groups.pipeline_rank]
        awaited = self._actions.awaited
        if position is None or position >= len(program):
            return Here()
        if awaited is None:
            return Here(position, str(program[position]))
        return Here(position, str(program[position]), self._groups.world_rank(awaited[0]), awaited[1])
