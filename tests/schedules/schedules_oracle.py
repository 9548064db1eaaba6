"""An independent judge of schedules of F and B, in plain dictionaries: what is there, and how long it takes.

It shares nothing with the package's checks and simulator, so that both can be wrong only separately.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from chimera.ir.action import Action, Kind
from chimera.ir.schedule import Schedule


@dataclass(frozen=True)
class Run:
    """What a schedule takes, in units of 1/p of the model for one whole micro-batch."""

    makespan: Fraction
    ideal: Fraction
    peaks: list[Fraction]

    @property
    def of_total(self) -> Fraction:
        return 1 - self.ideal / self.makespan

    @property
    def of_ideal(self) -> Fraction:
        return self.makespan / self.ideal - 1


def assert_complete(schedule: Schedule) -> None:
    """Hold that each (stage, micro-batch) has exactly one F and one B, on the rank its route says, and nothing else."""
    wanted = Counter(
        (schedule.rank_of(stage, microbatch), Action(kind, stage, microbatch))
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
        for kind in (Kind.F, Kind.B)
    )
    got = Counter((rank, action) for rank, program in enumerate(schedule.actions) for action in program)
    assert got == wanted


def run(schedule: Schedule, forward: int = 1, backward: int = 2) -> Run:
    """Run every rank's program in order as early as the data allows; fail if it gets stuck."""
    cost = {Kind.F: forward, Kind.B: backward}
    ends: dict[Action, int] = {}
    clocks = [0] * schedule.num_ranks
    held = [0] * schedule.num_ranks
    peaks = [0] * schedule.num_ranks
    waiting = [list(reversed(program)) for program in schedule.actions]
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(waiting):
            while program and all(needed in ends for needed in _needed(program[-1], schedule.num_stages)):
                action = program.pop()
                start = max([clocks[rank], *(ends[needed] for needed in _needed(action, schedule.num_stages))])
                clocks[rank] = ends[action] = start + cost[action.kind]
                held[rank] += 1 if action.kind is Kind.F else -1
                peaks[rank] = max(peaks[rank], held[rank])
                progress = True
    assert not any(waiting), f"stuck before {[str(program[-1]) for program in waiting if program]}"
    one = Fraction(schedule.num_ranks, schedule.num_stages) * Fraction(schedule.microbatch_share)
    ideal = Fraction(schedule.microbatch_share) * schedule.num_microbatches * (forward + backward)
    return Run(one * max(clocks), ideal, [one * peak for peak in peaks])


def _needed(action: Action, num_stages: int) -> list[Action]:
    kind, stage, microbatch = action
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, microbatch)] if stage else []
    own = Action(Kind.F, stage, microbatch)
    return [own] if stage == num_stages - 1 else [own, Action(Kind.B, stage + 1, microbatch)]
