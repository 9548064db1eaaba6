"""An independent judge of schedules, in plain dictionaries: what is there, and how long it takes.

It shares nothing with the package's checks and simulator, so that both can be wrong only separately.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from chimera.ir.action import WHOLE_STAGE, Action, Kind, flatten
from chimera.ir.schedule import Schedule


@dataclass(frozen=True)
class Run:
    """What a schedule takes, in units of 1/p of the model for one whole micro-batch."""

    makespan: Fraction
    ideal: Fraction
    peaks: list[Fraction]
    span: Fraction

    @property
    def of_total(self) -> Fraction:
        return 1 - self.ideal / self.makespan

    @property
    def of_ideal(self) -> Fraction:
        return self.makespan / self.ideal - 1


def assert_complete(schedule: Schedule) -> None:
    """Hold that each (stage, micro-batch) has one F, and one B or one I and one W, where its route says; nothing else.

    Reductions and updates of asynchronous schedules are passed over.
    """
    got = Counter(
        (rank, action)
        for rank, program in enumerate(schedule.actions)
        for action in flatten(program)
        if action.kind not in WHOLE_STAGE
    )
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            rank = schedule.rank_of(stage, microbatch)
            here = [kind for kind in Kind for _ in range(got.pop((rank, Action(kind, stage, microbatch)), 0))]
            assert here in ([Kind.F, Kind.B], [Kind.F, Kind.I, Kind.W])
    assert not got


def run(schedule: Schedule, forward: int = 1, backward: int = 2, weight: int | Fraction | None = None) -> Run:
    """Run every rank's program in order as early as the data allows; fail if it gets stuck.

    W is ``weight`` of the backward, half of it without; a pair runs its forward, then its backward.
    """
    weight = Fraction(backward, 2) if weight is None else weight
    cost = {
        Kind.F: forward,
        Kind.B: backward,
        Kind.I: backward - weight,
        Kind.W: weight,
        **dict.fromkeys(WHOLE_STAGE, 0),
    }
    ends: dict[Action, Fraction] = {}
    starts = [Fraction(-1)] * schedule.num_ranks
    clocks = [Fraction(0)] * schedule.num_ranks
    held = [0] * schedule.num_ranks
    peaks = [0] * schedule.num_ranks
    waiting = [[*flatten(program)][::-1] for program in schedule.actions]
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(waiting):
            while program and all(needed in ends for needed in _needed(program[-1], schedule.num_stages)):
                action = program.pop()
                start = max([clocks[rank], *(ends[needed] for needed in _needed(action, schedule.num_stages))])
                starts[rank] = start if starts[rank] < 0 else starts[rank]
                clocks[rank] = ends[_result(action)] = start + cost[action.kind]
                held[rank] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
                peaks[rank] = max(peaks[rank], held[rank])
                progress = True
    assert not any(waiting), f"stuck before {[str(program[-1]) for program in waiting if program]}"
    one = Fraction(schedule.num_ranks, schedule.num_stages) * Fraction(schedule.microbatch_share)
    ideal = Fraction(schedule.microbatch_share) * schedule.num_microbatches * (forward + backward)
    span = max(end - start for start, end in zip(starts, clocks, strict=True) if start >= 0)
    return Run(one * max(clocks), ideal, [one * peak for peak in peaks], one * span)


def _result(action: Action) -> Action:
    """Return what stands for the action's result: an I gives what a B gives, the input's gradient."""
    return Action(Kind.B, *action[1:]) if action.kind is Kind.I else action


def _needed(action: Action, num_stages: int) -> list[Action]:
    kind, stage, microbatch = action
    if kind in WHOLE_STAGE:
        return []
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, microbatch)] if stage else []
    if kind is Kind.W:
        return [Action(Kind.B, stage, microbatch)]
    own = Action(Kind.F, stage, microbatch)
    return [own] if stage == num_stages - 1 else [own, Action(Kind.B, stage + 1, microbatch)]
